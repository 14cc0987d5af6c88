"""The predictions of a run: the class predicted for each test picture after the last task."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from clipcil.errors import UserError
from clipcil.files import write_bytes
from clipcil.reading import MOST_TEXT, MissingFileError, read_bytes, read_text

PLAIN, PACKED = "predictions.csv", "predictions.csv.gz"


class TestAnswer(NamedTuple):
    """One line of `predictions.csv`."""

    task: int
    row: int
    true: str
    guess: str
    probability: float | None = None
    """Softmax of the logits for the class predicted; None in runs of version 0.1, which did not write it."""

    @property
    def right(self) -> bool:
        return self.true == self.guess


def read_predictions(folder: Path) -> list[TestAnswer]:
    """The predictions of the run in `folder`, from `predictions.csv` or its packed form.

    Raises:
        UserError: There is no such file, or it cannot be read.
    """
    path = folder / (PACKED if (folder / PACKED).exists() and not (folder / PLAIN).exists() else PLAIN)
    try:
        lines = csv.reader(io.StringIO(_text(path), newline=""))
        head = next(lines, [])
        return list(_unpacked(head, lines) if "step" in head else _plain(head, lines))
    except MissingFileError as error:
        raise UserError(f"{folder} holds no {PLAIN}") from error
    except (OSError, EOFError, ValueError, IndexError, csv.Error, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__})") from error


def _text(path: Path) -> str:
    if path.name == PLAIN:
        return read_text(path)
    with gzip.GzipFile(fileobj=io.BytesIO(read_bytes(path))) as file:
        content = file.read(MOST_TEXT + 1)
    if len(content) > MOST_TEXT:
        raise ValueError("it unpacks to more than any test set")
    return content.decode("utf-8")


def _plain(head: list[str], lines: Iterable[list[str]]) -> Iterator[TestAnswer]:
    task, row, true, guess = (head.index(name) for name in ("task", "row", "class", "predicted"))
    probability = head.index("probability") if "probability" in head else None
    for line in filter(None, lines):
        said = line[probability] if probability is not None else ""
        yield _checked(int(line[task]), int(line[row]), line[true], line[guess], float(said) if said else None)


def _unpacked(head: list[str], lines: Iterable[list[str]]) -> Iterator[TestAnswer]:
    """Whole lines, where `write_packed` left out what is as in the line before."""
    places = [head.index(name) for name in ("task", "class", "step", "predicted")]
    by_task = head[1] == "step"  # an earlier order of columns, whose steps go on from class to class
    task, true, row = 0, "", 0
    for line in filter(None, lines):
        said_task, said_true, step, guess = (line[place] for place in places)
        before = task, true
        task, true = int(said_task) if said_task else task, said_true or true
        same = task == before[0] and (by_task or true == before[1])
        row = int(step) + (row if same else 0)
        yield _checked(task, row, true, guess or true, None)


def _checked(task: int, row: int, true: str, guess: str, probability: float | None) -> TestAnswer:
    if not (0 < task < 2**31 and 0 <= row < 2**53 and 0 <= (probability or 0.0) <= 1):
        raise ValueError("a number is out of bounds")
    return TestAnswer(task, row, true, guess, probability)


def write_packed(predictions: Iterable[TestAnswer], path: Path) -> None:
    """Write what statistics and tables need, without the names of pictures: the same bytes every time.

    Class by class, and what can be told from the line before is left out: task and class where they are the same, the
    class predicted where it is the right one, and of a row how far it is from the one before in its class. That packs
    into a third of the bytes.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["task", "class", "step", "predicted"])
    task, true, row = 0, "", 0
    for each in sorted(predictions, key=lambda each: (each.task, each.true, each.row)):
        step = each.row - row if (each.task, each.true) == (task, true) else each.row
        name = each.true if each.true != true else ""
        writer.writerow([each.task if each.task != task else "", name, step, "" if each.right else each.guess])
        task, true, row = each.task, each.true, each.row
    write_bytes(path, gzip.compress(text.getvalue().encode(), 9, mtime=0))


class Pair(NamedTuple):
    """Pictures of one class that were mistaken for another."""

    true: str
    guess: str
    times: int
    share: float
    """In percent of all pictures of the true class."""


def confused_pairs(predictions: Sequence[TestAnswer], most: int = 12) -> list[Pair]:
    """The pairs of classes confused most often, the largest share first.

    Example:
        >>> wrong, right = TestAnswer(1, 0, "cat", "dog"), TestAnswer(1, 1, "cat", "cat")
        >>> confused_pairs([wrong, right])
        [Pair(true='cat', guess='dog', times=1, share=50.0)]
    """
    totals = Counter(each.true for each in predictions)
    counts = Counter((each.true, each.guess) for each in predictions if not each.right)
    pairs = [Pair(true, guess, count, 100 * count / totals[true]) for (true, guess), count in counts.items()]
    return sorted(pairs, key=lambda pair: (-pair.times, -pair.share, pair.true, pair.guess))[:most]


def confident_mistakes(predictions: Sequence[TestAnswer], most: int) -> list[TestAnswer]:
    """The mistakes, the most confident first; in the order of the file where no probability was written."""
    return sorted((each for each in predictions if not each.right), key=lambda each: -(each.probability or 0.0))[:most]

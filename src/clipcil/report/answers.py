"""The predictions of a run: the class predicted for each test picture after the last task."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from clipcil.errors import UserError
from clipcil.report.evidence import find_evidence, read_answers
from clipcil.storage import MissingFileError, read_text

PLAIN = "predictions.csv"


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
    """The predictions of the run in `folder`, from `predictions.csv`, or from evidence where it is part of that.

    Raises:
        UserError: There are no predictions, or they cannot be read.
    """
    path = folder / PLAIN
    try:
        if (evidence := find_evidence(folder)) is not None:
            found = [TestAnswer(*answer) for answer in read_answers(*evidence)]
            if not found:
                raise UserError(f"{folder} has no predictions")
            return found
        lines = csv.reader(io.StringIO(read_text(path), newline=""))
        return list(_answers(next(lines, []), lines))
    except MissingFileError as error:
        raise UserError(f"{folder} holds no {PLAIN}") from error
    except (OSError, ValueError, IndexError, csv.Error) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__})") from error


def _answers(head: list[str], lines: Iterable[list[str]]) -> Iterator[TestAnswer]:
    task, row, true, guess = (head.index(name) for name in ("task", "row", "class", "predicted"))
    probability = head.index("probability") if "probability" in head else None
    for line in filter(None, lines):
        said = line[probability] if probability is not None else ""
        yield _checked(int(line[task]), int(line[row]), line[true], line[guess], float(said) if said else None)


def _checked(task: int, row: int, true: str, guess: str, probability: float | None) -> TestAnswer:
    if not (0 < task < 2**31 and 0 <= row < 2**53 and 0 <= (probability or 0.0) <= 1):
        raise ValueError("a number is out of bounds")
    return TestAnswer(task, row, true, guess, probability)


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

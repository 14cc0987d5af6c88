"""The predictions of a run: the class predicted for each test picture after the last task, and thumbnails of them."""

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from clipcil.data.dataset import Dataset, open_dataset
from clipcil.data.pictures import thumbnail
from clipcil.errors import UserError
from clipcil.network import on_behalf_of_a_folder
from clipcil.report.runs import PREDICTIONS, RunRecord, find_evidence, read_parquet
from clipcil.settings import Count, Share
from clipcil.storage import MissingFileError, read_text

MOST_PICTURES = 12_000
"""Datasets with more test pictures than this are not opened for thumbnails."""
THUMBNAIL_SIDE = 96
"""Pixels of the longer side of a thumbnail."""


class TestAnswer(NamedTuple):
    """One line of `predictions.csv`."""

    task: Annotated[int, Field(ge=1, lt=2**31)]
    row: Count
    true: str
    guess: str
    probability: Share | None = None
    """Softmax of the logits for the class predicted; None in runs of version 0.1, which did not write it."""

    @property
    def right(self) -> bool:
        return self.true == self.guess


_answers = TypeAdapter(Annotated[list[TestAnswer], Field(min_length=1)])


def read_predictions(folder: Path) -> list[TestAnswer]:
    """The predictions of the run in `folder`, from `predictions.csv` or from evidence; missing ones are refused."""
    path = folder / "predictions.csv"
    try:
        if (evidence := find_evidence(folder)) is not None:
            kept = _kept(*evidence)
            rows = zip(*(kept[name].to_pylist() for name in ("task", "row", "true", "guess")), strict=True)
            return [TestAnswer(task, row, true, true if guess is None else guess) for task, row, true, guess in rows]
        lines = csv.DictReader(io.StringIO(read_text(path), newline=""))
        columns = ("task", "row", "class", "predicted")
        return _answers.validate_python(
            [(*(line[key] for key in columns), line.get("probability") or None) for line in lines]
        )
    except MissingFileError as error:
        raise UserError(f"{folder} holds no predictions.csv") from error
    except (KeyError, ValueError, csv.Error) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__})") from error


def read_outcomes(folder: Path) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Task, row and whether it was predicted right, of each test picture of the run in `folder`.

    Evidence is read without an object for each picture, which takes a hundredth of the time.
    """
    if (evidence := find_evidence(folder)) is not None:
        kept = _kept(*evidence)
        return kept["task"].to_numpy().astype(np.int64), kept["row"].to_numpy(), kept["guess"].is_null().to_numpy()
    task, row, right = zip(*((each.task, each.row, each.right) for each in read_predictions(folder)), strict=True)
    return np.array(task), np.array(row), np.array(right)


def _kept(folder: Path, run: str) -> Any:
    """The lines of one run in the table of predictions; a run whose predictions were not kept is refused."""
    table, places = _predictions(folder / PREDICTIONS)
    if run not in places:
        raise UserError(f"{folder / run} has no predictions")
    return table.slice(*places[run])


@lru_cache(maxsize=2)
def _predictions(path: Path) -> tuple[Any, dict[str, tuple[int, int]]]:
    """The table, and the first row and number of rows of each run, whose rows follow each other."""
    table = read_parquet(path).combine_chunks().unify_dictionaries()
    runs = table["run"].combine_chunks()
    names, starts, counts = np.unique(runs.indices.to_numpy(), return_index=True, return_counts=True)
    known = runs.dictionary.to_pylist()
    return table, {known[name]: (int(start), int(n)) for name, start, n in zip(names, starts, counts, strict=True)}


class Pair(NamedTuple):
    """Pictures of one class that were mistaken for another."""

    true: str
    guess: str
    times: int
    share: float
    """In percent of all pictures of the true class."""


def confused_pairs(predictions: Sequence[TestAnswer], fewest: int = 1, most: int = 12) -> list[Pair]:
    """The pairs of classes confused `fewest` times or more, the most frequent first.

    Examples:
        >>> wrong, right = TestAnswer(1, 0, "cat", "dog"), TestAnswer(1, 1, "cat", "cat")
        >>> confused_pairs([wrong, right])
        [Pair(true='cat', guess='dog', times=1, share=50.0)]
    """
    totals = Counter(each.true for each in predictions)
    counts = Counter((each.true, each.guess) for each in predictions if not each.right)
    pairs = [Pair(*pair, count, 100 * count / totals[pair[0]]) for pair, count in counts.items() if count >= fewest]
    return sorted(pairs, key=lambda pair: (-pair.times, -pair.share, pair.true, pair.guess))[:most]


Thumbnail = tuple[bytes, TestAnswer]
"""A small picture (JPEG) and the prediction for it."""


class Thumbnails:
    """Thumbnails of runs; each dataset is opened once for all runs on it."""

    def __init__(self) -> None:
        self._datasets: dict[str, Dataset | UserError] = {}

    def of(self, run: RunRecord, right: int = 8, wrong: int = 16) -> tuple[list[Thumbnail], list[Thumbnail]]:
        """Some right predictions, and the most confident mistakes (the first where no probability was written)."""
        predictions, dataset = read_predictions(run.folder), self._dataset(run)
        if len(dataset.test) > MOST_PICTURES:
            raise UserError(f"{run.data} has {len(dataset.test)} test pictures; strips are for small datasets")
        places = {int(row): index for index, row in enumerate(dataset.test.rows.tolist())}

        def shown(answer: TestAnswer) -> Thumbnail:
            place = places.get(answer.row)
            if place is None or dataset.classes[int(dataset.test.labels[place])] != answer.true:
                raise UserError(f"the pictures of {run.data} are not the ones the run was measured on")
            return thumbnail(dataset.test.image(place), THUMBNAIL_SIDE), answer

        some = [each for each in predictions if each.right]
        if len(some) > right:  # at equal distances, so that every task has its share
            some = [some[int((index + 0.5) * (len(some) / right))] for index in range(right)]
        mistakes = sorted((each for each in predictions if not each.right), key=lambda each: -(each.probability or 0.0))
        return [shown(each) for each in some], [shown(each) for each in mistakes[:wrong]]

    def _dataset(self, run: RunRecord) -> Dataset:
        """The dataset of a run; one that cannot be opened is not tried again."""
        root, options, held_out = run.run.get("data_root"), run.run.get("data_options") or {}, run.run.get("hold_out")
        key = json.dumps([run.data, root, options, [held_out, run.seed] if held_out else None], sort_keys=True)
        if key not in self._datasets:
            try:
                with on_behalf_of_a_folder():
                    dataset = open_dataset(run.data, Path(root) if root else None, options)
                    self._datasets[key] = dataset.hold_out(held_out, run.seed) if held_out else dataset
            except UserError as error:
                self._datasets[key] = error
        found = self._datasets[key]
        if isinstance(found, UserError):
            raise UserError(str(found))
        return found

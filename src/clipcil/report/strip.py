"""A strip of test pictures with what the method took them for, right and wrong."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipcil.errors import UserError
from clipcil.reading import MissingFileError, read_text
from clipcil.report.runs import RunResult

MOST_PICTURES = 12_000
"""Datasets with more test pictures than this are not opened for a strip."""
SIDE = 96


@dataclass(frozen=True)
class Prediction:
    """A line of `predictions.csv`."""

    task: int
    row: int
    true: str
    guess: str


@dataclass(frozen=True)
class Shown:
    """A small picture (JPEG), the class it is of, and the class it was taken for."""

    jpeg: bytes
    true: str
    guess: str

    @property
    def right(self) -> bool:
        return self.true == self.guess


def read_predictions(folder: Path) -> list[Prediction]:
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(folder / "predictions.csv"), newline="")))
        return [Prediction(int(r["task"]), int(r["row"]), str(r["class"]), str(r["predicted"])) for r in rows]
    except MissingFileError as error:
        raise UserError(f"{folder} holds no predictions.csv") from error
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise UserError(f"{folder / 'predictions.csv'} cannot be read ({type(error).__name__})") from error


def choose(predictions: Sequence[Prediction], count: int) -> list[Prediction]:
    """`count` of them at equal distances, so that every task has its share; the same ones every time."""
    if len(predictions) <= count:
        return list(predictions)
    step = len(predictions) / count
    return [predictions[int((index + 0.5) * step)] for index in range(count)]


class Strips:
    """Makes strips; each dataset is opened once for all runs on it."""

    def __init__(self) -> None:
        self._datasets: dict[str, Any] = {}

    def strip(self, run: RunResult, count: int = 8) -> tuple[list[Shown], list[Shown]]:
        """Right and wrong predictions, `count` of each at the most. A UserError says why there are none."""
        predictions = read_predictions(run.folder)
        test = self._dataset(run).test
        if len(test) > MOST_PICTURES:
            raise UserError(f"{run.data} has {len(test)} test pictures; strips are for small datasets")
        right = choose([p for p in predictions if p.true == p.guess], count)
        wrong = choose([p for p in predictions if p.true != p.guess], count)
        return [self._show(run, p) for p in right], [self._show(run, p) for p in wrong]

    def _show(self, run: RunResult, prediction: Prediction) -> Shown:
        dataset = self._dataset(run)
        place = {int(row): index for index, row in enumerate(dataset.test.rows.tolist())}.get(prediction.row)
        if place is None or dataset.classes[int(dataset.test.labels[place])] != prediction.true:
            raise UserError(f"the pictures of {run.data} are not the ones the run was measured on")
        image = dataset.test.image(place)
        image.thumbnail((SIDE, SIDE))
        held = io.BytesIO()
        image.save(held, format="JPEG", quality=85)
        return Shown(held.getvalue(), prediction.true, prediction.guess)

    def _dataset(self, run: RunResult) -> Any:
        """The dataset of a run; the second time from memory, whether it could be opened or not."""
        from clipcil.data.dataset import open_dataset

        choices = run.run
        root = choices.get("data_root")
        options = choices.get("data_options") or {}
        key = f"{run.data}|{root}|{sorted(options.items())}"
        if key not in self._datasets:
            try:
                self._datasets[key] = open_dataset(run.data, Path(root) if root else None, options)
            except UserError as error:
                self._datasets[key] = error
        found = self._datasets[key]
        if isinstance(found, UserError):
            raise UserError(str(found))
        return found

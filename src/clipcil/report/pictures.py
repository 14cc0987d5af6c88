"""Test pictures with their predictions: some correct ones, and the most confident mistakes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clipcil.data.pictures import thumbnail
from clipcil.errors import UserError
from clipcil.network import on_behalf_of_a_folder
from clipcil.report.answers import TestAnswer, confident_mistakes, read_predictions
from clipcil.report.runs import RunResult

MOST_PICTURES = 12_000
"""Datasets with more test pictures than this are not opened."""
SIDE = 96
"""Pixels of the longer side of a thumbnail."""


class Thumbnail(NamedTuple):
    """A small picture (JPEG) and the prediction for it."""

    jpeg: bytes
    true: str
    guess: str
    probability: float | None
    right: bool


def evenly_spaced(predictions: Sequence[TestAnswer], count: int) -> list[TestAnswer]:
    """`count` predictions at equal distances, so that every task has its share; the same ones every time."""
    if len(predictions) <= count:
        return list(predictions)
    step = len(predictions) / count
    return [predictions[int((index + 0.5) * step)] for index in range(count)]


class Thumbnails:
    """Thumbnails of runs; each dataset is opened once for all runs on it."""

    def __init__(self) -> None:
        self._datasets: dict[str, Any] = {}

    def of(self, run: RunResult, right: int = 8, wrong: int = 16) -> tuple[list[Thumbnail], list[Thumbnail]]:
        """Some right predictions, and the most confident mistakes.

        Raises:
            UserError: The predictions or the pictures of the run are missing; the line says why.
        """
        predictions = read_predictions(run.folder)
        dataset = self._dataset(run)
        if len(dataset.test) > MOST_PICTURES:
            raise UserError(f"{run.data} has {len(dataset.test)} test pictures; strips are for small datasets")
        places = {int(row): index for index, row in enumerate(dataset.test.rows.tolist())}

        def shown(answer: TestAnswer) -> Thumbnail:
            place = places.get(answer.row)
            if place is None or dataset.classes[int(dataset.test.labels[place])] != answer.true:
                raise UserError(f"the pictures of {run.data} are not the ones the run was measured on")
            jpeg = thumbnail(dataset.test.image(place), SIDE)
            return Thumbnail(jpeg, answer.true, answer.guess, answer.probability, answer.right)

        some = evenly_spaced([each for each in predictions if each.right], right)
        return [shown(each) for each in some], [shown(each) for each in confident_mistakes(predictions, wrong)]

    def _dataset(self, run: RunResult) -> Any:
        """The dataset of a run; the second time from memory, whether or not it could be opened."""
        from clipcil.data.dataset import open_dataset

        root, options = run.run.get("data_root"), run.run.get("data_options") or {}
        held_out = run.run.get("hold_out")
        key = json.dumps([run.data, root, options, [held_out, run.seed] if held_out else None], sort_keys=True)
        if key not in self._datasets:
            try:
                with on_behalf_of_a_folder():
                    dataset = open_dataset(run.data, Path(root) if root else None, options)
                    self._datasets[key] = dataset.hold_out(held_out, run.seed) if held_out else dataset
            except UserError as error:
                self._datasets[key] = error
            except OSError as error:  # a path that is too long, or a folder that may not be read
                self._datasets[key] = UserError(f"{run.data} cannot be opened: {error.strerror or error}")
        found = self._datasets[key]
        if isinstance(found, UserError):
            raise UserError(str(found))
        return found

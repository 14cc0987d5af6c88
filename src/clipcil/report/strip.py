"""Test pictures with their predictions: some correct ones, and the most confident mistakes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipcil.errors import UserError
from clipcil.network import on_behalf_of_a_folder
from clipcil.report.answers import TestAnswer, confident_mistakes, read_predictions
from clipcil.report.runs import RunResult

MOST_PICTURES = 12_000
"""Datasets with more test pictures than this are not opened for a strip."""
SIDE = 96


@dataclass(frozen=True)
class Shown:
    """A small picture (JPEG) and the prediction for it."""

    jpeg: bytes
    prediction: TestAnswer


def choose(predictions: Sequence[TestAnswer], count: int) -> list[TestAnswer]:
    """`count` of them at equal distances, so that every task has its share; the same ones every time."""
    if len(predictions) <= count:
        return list(predictions)
    step = len(predictions) / count
    return [predictions[int((index + 0.5) * step)] for index in range(count)]


class Strips:
    """Makes strips; each dataset is opened once for all runs on it."""

    def __init__(self) -> None:
        self._datasets: dict[str, Any] = {}

    def strip(self, run: RunResult, right: int = 8, wrong: int = 16) -> tuple[list[Shown], list[Shown]]:
        """Some right predictions, and the most confident mistakes. A UserError says why there are none."""
        predictions = read_predictions(run.folder)
        test = self._dataset(run).test
        if len(test) > MOST_PICTURES:
            raise UserError(f"{run.data} has {len(test)} test pictures; strips are for small datasets")
        some = choose([each for each in predictions if each.right], right)
        mistakes = confident_mistakes(predictions, wrong)
        return [self._show(run, each) for each in some], [self._show(run, each) for each in mistakes]

    def _show(self, run: RunResult, prediction: TestAnswer) -> Shown:
        dataset = self._dataset(run)
        place = {int(row): index for index, row in enumerate(dataset.test.rows.tolist())}.get(prediction.row)
        if place is None or dataset.classes[int(dataset.test.labels[place])] != prediction.true:
            raise UserError(f"the pictures of {run.data} are not the ones the run was measured on")
        image = dataset.test.image(place)
        image.thumbnail((SIDE, SIDE))
        held = io.BytesIO()
        image.save(held, format="JPEG", quality=85)
        return Shown(held.getvalue(), prediction)

    def _dataset(self, run: RunResult) -> Any:
        """The dataset of a run; the second time from memory, whether it could be opened or not."""
        from clipcil.data.dataset import open_dataset

        choices = run.run
        root = choices.get("data_root")
        options = choices.get("data_options") or {}
        held_out = choices.get("hold_out")
        fold = f"|{held_out}|{run.seed}" if held_out else ""
        key = f"{run.data}|{root}|{sorted(options.items())}{fold}"
        if key not in self._datasets:
            try:
                with on_behalf_of_a_folder():
                    dataset = open_dataset(run.data, Path(root) if root else None, options)
                    self._datasets[key] = dataset.hold_out(held_out, run.seed) if held_out else dataset
            except UserError as error:
                self._datasets[key] = error
            except OSError as error:  # a path that is too long, or leads through somebody's folder
                self._datasets[key] = UserError(f"{run.data} cannot be opened: {error.strerror or error}")
        found = self._datasets[key]
        if isinstance(found, UserError):
            raise UserError(str(found))
        return found

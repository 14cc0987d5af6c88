"""Runs that are over in a moment, and that can be stopped as a kill would stop them."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clipcil.clip import CLIP
from clipcil.data.dataset import Dataset
from clipcil.experiment import experiment as experiments
from clipcil.experiment.experiment import Experiment, LoadCache
from clipcil.experiment.monitor import Display
from clipcil.experiment.spec import RunSpec, method_settings
from clipcil.settings import build
from clipcil.storage import read_toml
from clipcil.tensor_store import TensorStore
from clipcil.training.trainer import Training

SAME = ("config.toml", "results.json", "matrix.csv", "predictions.csv", "steps.jsonl")
"""The files of a run that must be the same bytes however often it was stopped."""


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the package catches it, and nothing is written after it."""


def interrupt(*_: object) -> None:
    """Stands for Ctrl-C."""
    raise KeyboardInterrupt


class Told(Display):
    """Keeps the lines that a person would have read."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def tell(self, line: str) -> None:
        self.lines.append(line)


class Runner:
    """Runs methods on six classes in three tasks, sharing the backbone and the pictures."""

    def __init__(self, clip: CLIP, data: Dataset, epochs: int = 2) -> None:
        self.clip, self.data, self.epochs = clip, data, epochs

    def shared(self) -> LoadCache:
        """A new process would share only the frozen backbone and the files on disk."""
        return LoadCache(backbones={"mini": self.clip})

    def settings(self, method: str, **changes: Any) -> tuple[RunSpec, Any]:
        spec = RunSpec(method=method, **{"increment": 2, **changes})
        config = method_settings(spec, {})
        short = {
            field.name: dataclasses.replace(getattr(config, field.name), epochs=self.epochs, steps=0, batch_size=8)
            for field in dataclasses.fields(config)
            if isinstance(getattr(config, field.name), Training)
        }
        return spec, dataclasses.replace(config, **short)

    def run(self, method: str, out: Path, resume: bool = False, display: Display | None = None, **changes: Any) -> None:
        spec, config = self.settings(method, **changes)
        if resume:  # as the command does: from what is kept in the folder
            table = read_toml(out / "config.toml")
            spec, config = build(RunSpec, table["run"]), method_settings(spec, table["method"], preset=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experiments, "open_dataset", lambda *_: self.data)
            Experiment.of(spec, config, self.shared()).run(out, display=display, resume=resume)

    def interrupted(self, method: str, out: Path, stop_at: Callable[[int], bool]) -> int:
        """Run, being killed after the n-th checkpoint or stage wherever `stop_at(n)`; returns the kills."""
        kills = 0
        with pytest.MonkeyPatch.context() as patch:
            stop_after(patch, stop_at)
            for attempt in range(100):
                try:
                    self.run(method, out, resume=attempt > 0)
                    return kills
                except Killed:
                    kills += 1
        raise AssertionError("the run does not get any further")


def stop_after(patch: pytest.MonkeyPatch, stop_at: Callable[[int], bool] | int) -> None:
    """Raise `Killed` when the n-th checkpoint or stage of a run has been written."""
    whole, written = TensorStore.save, 0

    def save_and_die(self: TensorStore, *args: Any) -> Path:
        nonlocal written
        path = whole(self, *args)
        if "checkpoint" not in self.folder.parts:  # features that runs share
            return path
        written += 1
        if stop_at(written) if callable(stop_at) else written == stop_at:
            raise Killed
        return path

    patch.setattr(TensorStore, "save", save_and_die)


def digest(folder: Path, names: tuple[str, ...] = SAME) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its contents."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

"""Callbacks of a run: the log of its steps and the seconds of its phases."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from clipcil.errors import UserError
from clipcil.storage import open_log
from clipcil.training.trainer import Callback


class Timer(Callback):
    """Adds up the seconds of stages and phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = 0.0

    def begin_stage(self, stage: str, epochs: int, steps: int) -> None:
        self._since = time.perf_counter()

    def end_stage(self, stage: str) -> None:
        self._add(stage, time.perf_counter() - self._since)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - start)

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class StepLog(Callback):
    """`steps.jsonl`: a line for every training step.

    Losses stay on the device until the stage ends, so that a step never waits for them. The log of a resumed run reads
    as if it had never stopped: lines after `size` are removed before new ones are added.

    Args:
        path: The file.
        tell: Called with a line for the user.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.path, self.tell = path, tell
        self.size = 0
        """Bytes of the log that belong to the run."""
        self.task = 0
        self._waiting: list[tuple[str, int, int, Tensor, float]] = []

    def step(self, stage: str, epoch: int, step: int, loss: Tensor, rate: float) -> None:
        self._waiting.append((stage, epoch, step, loss, rate))

    def end_stage(self, stage: str) -> None:
        self.write()

    def write(self) -> None:
        """Write the lines of all steps since the last call."""
        losses = torch.stack([row[3].float() for row in self._waiting]).tolist() if self._waiting else []
        lines = [
            {"task": self.task, "stage": name, "epoch": epoch, "step": step, "loss": loss, "rate": rate}
            for (name, epoch, step, _, rate), loss in zip(self._waiting, losses, strict=True)
        ]
        self._waiting = []
        try:
            with open_log(self.path) as file:
                there = file.seek(0, os.SEEK_END)
                if there < self.size:  # the results do not depend on the log
                    self.tell(f"{self.path} was removed or truncated; the losses before this point are lost")
                file.truncate(min(self.size, there))
                file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
                self.size = file.seek(0, os.SEEK_END)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror or error}") from error


def peak_megabytes() -> float | None:
    """The most memory this process has held since it began; None where the system does not say (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux, bytes on macOS
    return round(used / (1024**2 if sys.platform == "darwin" else 1024), 1)

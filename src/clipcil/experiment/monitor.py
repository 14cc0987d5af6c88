"""The monitor of a run: the log of steps, seconds per phase, snapshots, and the display."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from clipcil.distributed import from_first
from clipcil.errors import UserError
from clipcil.experiment.checkpoint import SnapshotFolder
from clipcil.experiment.display import Display
from clipcil.files import open_log
from clipcil.training.loop import Monitor, Snapshot

SNAPSHOT_SHARE = 0.05
"""A snapshot is taken once training since the last one took so long that this one is at most this share of it."""


class RunMonitor(Monitor):
    """The monitor of one run. Losses stay on the device until the log is written: a step never waits for them.

    A stage has a snapshot when it ends, and after its epochs; where an epoch takes less time than writing one, after
    some of them. What a killed run has to train again is then at most about 20 times what a snapshot takes.
    """

    def __init__(self, log: Path | None, display: Display, snapshots: SnapshotFolder | None) -> None:
        self.display, self.snapshots = display, snapshots
        self.seconds: dict[str, float] = {}
        self._task = 0
        self._place = -1
        """Place of the current stage in the task."""
        self._log = log
        self._waiting: list[tuple[str, int, int, Tensor, float]] = []
        self._since = 0.0
        self._saved = self._cost = 0.0
        """When the last snapshot was there, and the seconds it took."""
        self.log_size = 0
        """Bytes of the log covered by the current snapshot."""

    def begin_task(self, index: int) -> None:
        """Learning of task `index` begins; the next stage is its first."""
        self._task, self._place = index, -1

    def cut_log(self) -> None:
        """Remove lines written after the current snapshot: the log of a resumed run reads as if never stopped."""
        with self._open_log() as file:
            self._cut(file)

    @contextmanager
    def _open_log(self) -> Iterator[BinaryIO]:
        assert self._log is not None
        try:
            with open_log(self._log) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # before the snapshot that counts on it
        except OSError as error:
            raise UserError(f"cannot write {self._log}: {error.strerror or error}") from error

    def _cut(self, file: BinaryIO) -> None:
        there = file.seek(0, os.SEEK_END)
        if there < self.log_size:  # not an error: the results do not depend on the log
            self.display.tell(f"{self._log} was removed or truncated; the losses before this point are lost")
            self.log_size = there
        file.truncate(self.log_size)

    def begin(self, stage: str, epochs: int, steps: int) -> None:
        self._place += 1
        self.display.stage(stage, epochs * steps)
        self._since = time.perf_counter()

    def step(self, stage: str, epoch: int, step: int, loss: Tensor, rate: float) -> None:
        self._waiting.append((stage, epoch, step, loss, rate))
        self.display.advance()

    def finish_epoch(self, stage: str, epoch: int, last: bool, snapshot: Callable[[], Snapshot]) -> None:
        now = time.perf_counter()
        self._count(stage, now - self._since)
        self._since = now
        if self.snapshots is not None and not last and (now - self._saved) * SNAPSHOT_SHARE < self._cost:
            return
        if self._log is not None:
            self._write_log()
        self._waiting = []
        if self.snapshots is not None:
            self.snapshots.save(self._task, self._place, stage, snapshot(), self.log_size)
            self._saved = time.perf_counter()
            self._cost = self._saved - now

    def _write_log(self) -> None:
        assert self._log is not None
        losses = torch.stack([row[3].float() for row in self._waiting]).tolist() if self._waiting else []
        with self._open_log() as file:
            self._cut(file)
            for (name, at, step, _, rate), loss in zip(self._waiting, losses, strict=True):
                line = {"task": self._task, "stage": name, "epoch": at, "step": step, "loss": loss, "rate": rate}
                file.write(json.dumps(line).encode() + b"\n")
        self.log_size = self._log.stat().st_size

    def restore(self, stage: str) -> Snapshot | None:
        found = self.snapshots.load(self._task, self._place) if self.snapshots is not None else None
        found = from_first(found)  # where several processes work on a run, the first alone reads and writes files
        if found is None:
            return None
        snapshot, self.log_size = found
        return snapshot

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.display.stage(name, 0)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._count(name, time.perf_counter() - start)
            self.display.stage("", 0)

    def _count(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def peak_megabytes() -> float | None:
    """The most memory this process has held since it began; None where the system does not say (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux, bytes on macOS
    return round(used / (1024**2 if sys.platform == "darwin" else 1024), 1)

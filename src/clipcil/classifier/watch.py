"""Shows how learning goes on a display, and keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from clipcil.experiment.display import Display
from clipcil.training.loop import Monitor


class LearnMonitor(Monitor):
    """Stages and steps on a display; no log and no snapshots: a lesson takes minutes and is given again if stopped."""

    def __init__(self) -> None:
        self.display = Display()

    def begin(self, stage: str, epochs: int, steps: int) -> None:
        self.display.stage(stage, epochs * steps)

    def step(self, stage: str, epoch: int, step: int, loss: Tensor, rate: float) -> None:
        self.display.advance()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.display.stage(name, 0)
        yield

"""One lesson: its result, its record in the model, and the monitor that reports progress and stops it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from clipcil.classifier.scoring import Calibration, Evaluation
from clipcil.errors import UserError
from clipcil.training.trainer import Callback

Progress = Callable[[str, int, int], None]
"""`on_progress(stage, done, total)`; total is 0 where there is nothing to count."""


class LessonStoppedError(UserError):
    """`should_stop` returned True: the model is as it was before the lesson."""


@dataclass
class Lesson:
    """The result of one `learn()` call."""

    new: dict[str, int] = field(default_factory=dict)
    """Pictures of each class that was new, held-out ones included."""
    again: dict[str, int] = field(default_factory=dict)
    """Pictures of each class that was known."""
    unreadable: list[str] = field(default_factory=list)
    """A line for each picture that could not be read and was left out (`skip_broken`)."""
    repeated: list[str] = field(default_factory=list)
    """Pictures left out because they were taught before, or twice in this lesson."""
    skipped: list[Path] = field(default_factory=list)
    """Files of the folder that were not learnt: they are not pictures, or are outside the class folders."""
    held_out: int = 0
    """Pictures of this lesson that the model did not train on."""
    left_one_out: bool = False
    """Whether the pictures of the evaluation were trained on and each scored by the model without it."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """The current model on all pictures kept for evaluation, those of earlier lessons included."""
    calibration: Calibration = field(default_factory=Calibration)
    warnings: list[str] = field(default_factory=list)
    """Warnings about the reliability of the model, a sentence each."""

    @property
    def pictures(self) -> int:
        """Pictures that were learnt, held-out ones included."""
        return sum(self.new.values()) + sum(self.again.values())

    @property
    def accuracy(self) -> float | None:
        """Accuracy over all classes on the pictures kept for evaluation; None without any."""
        return self.evaluation.accuracy


@dataclass(frozen=True)
class LessonRecord:
    """What a model stores about a lesson."""

    when: str
    """Date and time, as ISO 8601 with the seconds."""
    new: int
    """Classes that were new."""
    again: int
    """Classes that were known and got more pictures."""
    pictures: int
    """Pictures given."""
    classes: int
    """Classes known after it."""
    held_out: int
    """Pictures of all classes that the accuracy was measured on."""
    right: int
    """Those that were classified correctly after the lesson."""

    @property
    def accuracy(self) -> float | None:
        return self.right / self.held_out if self.held_out else None


class LearnMonitor(Callback):
    """Passes progress on and stops the lesson when asked; keeps no log and no snapshots: a stopped lesson is given
    again."""

    def __init__(self) -> None:
        self._on_progress: Progress | None = None
        self._should_stop: Callable[[], bool] | None = None
        self._done = self._total = 0

    @contextmanager
    def watching(self, on_progress: Progress | None, should_stop: Callable[[], bool] | None) -> Iterator[None]:
        """Use these two callbacks while the block runs."""
        self._on_progress, self._should_stop = on_progress, should_stop
        try:
            yield
        finally:
            self._on_progress = self._should_stop = None

    def check(self) -> None:
        """Stop the lesson if that was asked for.

        Raises:
            LessonStoppedError: It was.
        """
        if self._should_stop is not None and self._should_stop():
            raise LessonStoppedError("the lesson was stopped; the model is as it was before")

    def progress(self, stage: str, done: int, total: int) -> None:
        self.check()
        if self._on_progress is not None:
            self._on_progress(stage, done, total)

    def begin_stage(self, stage: str, epochs: int, steps: int) -> None:
        self._done, self._total = 0, epochs * steps
        self.progress(stage, 0, self._total)

    def step(self, stage: str, epoch: int, step: int, loss: Tensor, rate: float) -> None:
        self._done += 1
        self.progress(stage, self._done, self._total)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.progress(name, 0, 0)
        yield

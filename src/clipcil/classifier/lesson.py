"""One lesson: its result, which of its pictures are new, and the callback that reports progress and stops it."""

import hashlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from clipcil.classifier.scoring import Calibration, Evaluation
from clipcil.classifier.state import Facts, TaughtPictures
from clipcil.data.names import same_name
from clipcil.data.pictures import Picture, PictureSet, contents
from clipcil.errors import UserError
from clipcil.storage import open_regular
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


def find_new(
    pictures: PictureSet, labels: Tensor, taught: TaughtPictures, names: Sequence[str], lesson: Lesson
) -> tuple[Tensor, Tensor]:
    """Rows and checksums of the pictures that were not taught before as the same class, nor twice in this lesson."""
    classes: dict[int, set[int]] = {}  # of each checksum
    for label, number in zip(taught.labels.tolist(), taught.checksums.tolist(), strict=True):
        classes.setdefault(number, set()).add(label)
    found: dict[int, int] = {}
    twofold: dict[tuple[int, int], list[str]] = {}  # pictures of (the class now, the class before)
    for row, label in enumerate(labels.tolist()):
        number = checksum(pictures.pictures[int(pictures.rows[row])])
        before = classes.setdefault(number, set())
        if label in before:
            lesson.repeated.append(pictures.describe(row))
            continue
        if before:
            twofold.setdefault((label, next(iter(before))), []).append(pictures.describe(row))
        before.add(label)
        found[row] = number
    for (now, then), same in twofold.items():
        which = f"{same[0]} is" if len(same) == 1 else f"{len(same)} pictures ({same[0]}, …) are"
        lesson.warnings.append(f"{which} taught as '{names[now]}' and as '{names[then]}'")
    return torch.tensor([*found], dtype=torch.int64), torch.tensor([*found.values()], dtype=torch.int64)


def checksum(picture: Picture) -> int:
    """64 bits of a checksum of a file's bytes, or of the pixels of a picture in memory.

    A file that cannot be read gets a unique number: decoding it reports the error.
    """
    digest = hashlib.blake2b(digest_size=8)
    if isinstance(picture, Path):
        try:
            with open_regular(picture, links=True) as file:
                while chunk := file.read(2**20):
                    digest.update(chunk)
        except (UserError, OSError):
            digest.update(uuid.uuid4().bytes)
    else:
        digest.update(picture if isinstance(picture, bytes) else contents(picture))
    return int.from_bytes(digest.digest(), "little", signed=True)


def former_names(names: Sequence[str], facts: Facts, reads_names: bool) -> list[str]:
    """A line for each new class that has the former name of a renamed class, which keeps its text."""
    why = "; if not, expect confusion: CLIP reads one text for both" if reads_names else ""
    before = {same_name(known.text): known.name for known in facts.known}
    return [
        f"'{name}' is learnt as a new class, but '{old}' had this name before it was renamed; if they are one class,"
        f" undo this lesson and teach the pictures as '{old}'{why}"
        for name in names
        if (old := before.get(same_name(name))) is not None
    ]


class LearnMonitor(Callback):
    """Passes the progress of a lesson on, and stops the lesson when asked."""

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
        """Raise a `LessonStoppedError` if the lesson should stop."""
        if self._should_stop is not None and self._should_stop():
            raise LessonStoppedError("the lesson was stopped; the model is as it was before")

    def progress(self, stage: str, done: int, total: int) -> None:
        """Report that `done` of `total` are done."""
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

"""Pictures kept for evaluation: only their features are stored, and every lesson scores all of them again.

They are held out of training; or, where a method can compute leave-one-out scores, they are used for training like all
others and scored by leaving each one out, so that few pictures serve both purposes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.calibration import paired_map
from clipcil.classifier.lesson import Lesson
from clipcil.classifier.predict import rank
from clipcil.classifier.scoring import ENOUGH, Answer, Calibration, Evaluation, calibrate, evaluate_answers
from clipcil.classifier.state import PictureRows
from clipcil.data.reader import Pictures
from clipcil.experiment.evaluate import BATCH
from clipcil.memory.gaussians import AffineMap
from clipcil.methods.base import Method

FEWEST = 5
"""Minimum number of pictures of a class for some to be held out: with fewer, all are needed for training."""
MOST = 50
"""Maximum number of pictures of a class held out of one lesson: more would add little and cost training pictures."""
LEFT_OUT = 20
"""Maximum number of pictures of a class kept of one lesson where they are left out one by one instead of held out."""


def split_held_out(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows held out, by the class (N,) of each picture.

    Of each class a tenth is held out, at least one and at most `MOST` pictures, spread evenly; of a class with fewer
    than `FEWEST` pictures none.
    """
    held = _spread(labels, lambda total: min(MOST, max(1, total // 10)) if total >= FEWEST else 0)
    return torch.nonzero(~held).flatten(), torch.nonzero(held).flatten()


def choose_left_out(labels: Tensor) -> Tensor:
    """Rows of at most `LEFT_OUT` pictures of each class, spread evenly over its pictures.

    A single picture of a class is not taken: without it the class would be unknown, and every such picture a mistake.
    """
    return torch.nonzero(_spread(labels, lambda total: min(LEFT_OUT, total) if total > 1 else 0)).flatten()


def _spread(labels: Tensor, how_many: Callable[[int], int]) -> Tensor:
    """(N,) bool: `how_many(n)` of the n pictures of each class, at even distances."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in torch.unique(labels).tolist():
        rows = torch.nonzero(labels == label).flatten()
        count = how_many(len(rows))
        chosen[rows[[(2 * i + 1) * len(rows) // (2 * count) for i in range(count)]]] = True
    return chosen


class PixelsNeededError(Exception):
    """A method asked for the pixels of pictures of which only features are kept."""


class FeatureBatch:
    """A batch of pictures of which only the features are kept."""

    def __init__(self, features: Tensor, levels: Tensor, width: int) -> None:
        self.features, self.levels, self.pooled = features, levels, levels[:, -width:]

    def __len__(self) -> int:
        return len(self.features)

    @property
    def pixels(self) -> Tensor:
        raise PixelsNeededError


@dataclass
class HeldOut(PictureRows):
    """Features of all pictures kept for evaluation so far, in the space of the current tower."""

    prefix: ClassVar[str] = "held_out."
    features: Tensor
    """(N, dim) float32."""
    levels: Tensor
    """(N, sum of the tower's `level_sizes`) float32: before the tower's last projection, which some methods read."""
    carried: Tensor
    """(N,) bool: whether the features were transported by a map instead of computed by the current tower."""

    @classmethod
    def empty(cls, dim: int, levels: int) -> HeldOut:
        nothing = torch.zeros(0, dtype=torch.int64)
        return cls(nothing, torch.zeros(0, dim), torch.zeros(0, levels), nothing.bool())

    def with_pictures(self, pictures: Pictures) -> HeldOut:
        """With these pictures added, encoded by the current tower."""
        if not len(pictures):
            return self
        computed = torch.zeros(len(pictures), dtype=torch.bool)
        return self.with_rows(pictures.labels.cpu(), pictures.features.cpu(), pictures.levels.cpu(), computed)

    def moved(self, by: AffineMap) -> HeldOut:
        """Transported into the space of the changed tower by a map between unit features."""
        features = by(normalize(self.features, dim=-1).double()).float()
        return HeldOut(self.labels, features, self.levels, torch.ones_like(self.carried))

    def batch(self, device: torch.device, width: int) -> FeatureBatch:
        """The rows as a method reads them; `width` is that of the vision tower."""
        return FeatureBatch(self.features.to(device), self.levels.to(device), width)


@contextmanager
def follow_tower(method: Method, held: HeldOut, pictures: Pictures) -> Iterator[list[AffineMap]]:
    """Yield a list that holds, after the block, the map for old held-out features if the tower has changed.

    The old pictures are gone, so the tower cannot encode them again. The map is fitted to the unit features of
    `pictures` before and after, as a method's own calibration of its stored statistics is.
    """
    found: list[AffineMap] = []
    if not (method.tunes_tower and len(held) and len(pictures)):
        yield found
        return
    version, before = method.clip.version, normalize(pictures.features, dim=-1)
    yield found
    if method.clip.version != version:
        found.append(paired_map(before, normalize(pictures.features, dim=-1)))


@torch.no_grad()
def held_out_scores(method: Method, held: HeldOut) -> tuple[Tensor, Tensor | None]:
    """Logits (N, C) and novelty (N,) of every picture kept for evaluation, by the current method.

    Each picture is left out where the method can do that. No novelty is returned where the method has no such score.
    """
    if not len(held):
        return torch.zeros(0, method.seen), None
    batch, labels = held.batch(method.device, method.clip.config.vision.width), held.labels.to(method.device)
    novelty: Tensor | None
    if method.implements("leave_one_out"):
        logits, novelty = method.leave_one_out(batch, labels)
    else:
        logits, novelty = method.logits(batch), method.novelty(batch)
    return logits.float().cpu(), None if novelty is None else novelty.float().cpu()


def evaluate_scores(
    logits: Tensor, novelty: Tensor | None, labels: Tensor, names: list[str], how: Calibration
) -> Evaluation:
    """Evaluate `logits` (N, C) and `novelty` (N,) against the true classes `labels` (N,)."""
    strange = [None] * len(logits) if novelty is None else novelty.tolist()
    found = (rank(row, each, names, 1, how) for row, each in zip(logits, strange, strict=True))
    answers = (
        Answer(names[label], guess.names[0], guess.probabilities[0], guess.unknown)
        for label, guess in zip(labels.tolist(), found, strict=True)
    )
    return evaluate_answers(answers, names)


@torch.no_grad()
def measure(method: Method, held: HeldOut, newest: Pictures, names: list[str], lesson: Lesson) -> HeldOut:
    """Score the pictures kept of earlier lessons (`held`) and of this one (`newest`); returns both together.

    Evaluation, calibration and warnings of the lesson are filled in.
    """
    lesson.left_one_out = method.implements("leave_one_out")
    lesson.held_out = 0 if lesson.left_one_out else len(newest)
    held = held.with_pictures(newest)
    try:
        labels, (logits, novelty) = held.labels, held_out_scores(method, held)
    except PixelsNeededError:
        held = held.none()
        batches = [method.logits(batch).float().cpu() for batch in newest.batches(BATCH)]
        labels, logits = newest.labels.cpu(), torch.cat(batches) if batches else torch.zeros(0, method.seen)
        novelty = None
        lesson.warnings.append(
            f"{method.title} reads the pixels of a picture, not its features, so the accuracy and the threshold are"
            " based only on the pictures held out of this lesson"
        )
    lesson.calibration = calibrate(logits, labels, method.score_scale, novelty)
    lesson.evaluation = evaluate_scores(logits, novelty, labels, names, lesson.calibration)
    if len(names) == 1:
        lesson.warnings.append(
            f"the model knows one class, so it predicts '{names[0]}' for every picture; teach it another class"
        )
    elif len(labels) < ENOUGH:
        lesson.warnings.append(
            f"{len(labels)} pictures kept for evaluation are too few (fewer than {ENOUGH}) to detect unknown"
            " ones, so none is called 'none of these' yet"
        )
    return held

"""Evaluating a method on the pictures kept for that, and fitting temperature and threshold to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.calibration import paired_map
from clipcil.classifier.evaluation import Answer, Evaluation, evaluate_answers
from clipcil.classifier.held_out import HeldOut, LeavesOneOut, PixelsNeededError
from clipcil.classifier.lesson import Lesson
from clipcil.classifier.predicting import rank
from clipcil.classifier.unknown import ENOUGH, Calibration, calibrate
from clipcil.data.reader import Pictures
from clipcil.experiment.evaluate import BATCH
from clipcil.memory.gaussians import AffineMap
from clipcil.methods.base import Method


@contextmanager
def follow_tower(method: Method, held: HeldOut, pictures: Pictures) -> Iterator[list[AffineMap]]:
    """Find the map that transports old held-out features if the tower changes while the block runs.

    The old pictures are gone, so the tower cannot encode them again. The map is fitted to the unit features of
    `pictures` before and after, as a method's own calibration of its stored statistics is.

    Yields:
        A list that holds the map after the block, or nothing if the tower did not change.
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
    if isinstance(method, LeavesOneOut):
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
    """Score all pictures kept for evaluation and fill in evaluation, calibration and warnings of a lesson.

    Args:
        method: As it is after the lesson.
        held: Pictures of earlier lessons.
        newest: Those of this lesson.
        names: The classes.
        lesson: What to fill in.

    Returns:
        The pictures to keep for the next lesson.
    """
    lesson.left_one_out = isinstance(method, LeavesOneOut)
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

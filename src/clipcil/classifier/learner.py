"""A method with its classes and what is kept of lessons: the part of a `Classifier` that a lesson changes."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipcil.classifier.held_out import (
    HeldOut,
    choose_left_out,
    evaluate_scores,
    follow_tower,
    held_out_scores,
    measure,
    split_held_out,
)
from clipcil.classifier.lesson import Lesson, LessonPlan, plan_lesson
from clipcil.classifier.predict import Scores, stream_scores
from clipcil.classifier.scoring import Evaluation, calibrate
from clipcil.classifier.sources import TEMPLATE
from clipcil.classifier.state import Facts, KnownClass, LessonRecord, ModelState, TaughtPictures
from clipcil.clip import CLIP
from clipcil.data.dataset import Dataset
from clipcil.data.reader import Pictures, Reader, TensorBatch
from clipcil.data.tasks import Task
from clipcil.errors import UserError
from clipcil.methods.base import Method, build_method, method_state
from clipcil.settings import to_dict
from clipcil.training.trainer import Trainer

SEED_STEP = 1_000_003
"""Lesson k draws from seed + k · SEED_STEP: a large prime, so that the lessons of models with neighbouring seeds never
share a seed."""


class Learner:
    """A method, its classes, the pictures kept for evaluation, and the checksums of those taught."""

    def __init__(
        self, kind: type[Method], config: Any, clip: CLIP, trainer: Trainer, seed: int, state: ModelState | None
    ) -> None:
        self.kind, self.config, self.trainer, self.clip = kind, config, trainer, clip.to(trainer.device)
        if state is None:
            fingerprint = f"{clip.fingerprint}/{clip.preprocess.fingerprint}"
            about: dict[str, Any] = {"method": kind.name, "settings": {}, "backbone": "", "fingerprint": fingerprint}
            state = ModelState(Facts(**about, seed=seed, templates=(TEMPLATE,)), {})
        self.restore(state)

    def restore(self, state: ModelState) -> None:
        """Take over `state`; the method is built again."""
        self.facts, tensors = copy.deepcopy(state.facts), dict(state.tensors)
        self.facts.backbone, self.facts.settings = self.clip.pinned, to_dict(self.config)
        tensors.pop("held_out", None)  # version 0.1 kept the scores of these pictures
        nothing, classes = torch.zeros(0, dtype=torch.int64), len(self.facts.known)
        self.taught = TaughtPictures(nothing, nothing).take(tensors, classes)
        levels = sum(self.clip.vision.level_sizes)
        self.held = HeldOut.empty(self.clip.config.dim, levels).take(tensors, classes)
        shape = {"names": [known.text for known in self.facts.known], "sizes": self.facts.sizes}
        kept, templates = (tensors, shape) if classes else None, self.facts.templates
        with torch.random.fork_rng(devices=[]):
            self.method = build_method(
                self.kind, self.config, self.clip, self.trainer, self.facts.seed, templates, kept
            )

    def state(self) -> ModelState:
        """A copy of everything that lessons change."""
        tensors = method_state(self.method)[0] if self.facts.known else {}
        tensors = {**tensors, **self.held.tensors(), **self.taught.tensors()}
        return ModelState(copy.deepcopy(self.facts), {key: value.detach().clone() for key, value in tensors.items()})

    def plan(self, dataset: Dataset, lesson: Lesson) -> LessonPlan:
        """See `plan_lesson`."""
        with self.trainer.phase("comparing with pictures taught before"):
            return plan_lesson(dataset, self.facts, self.taught, self.kind, lesson)

    def teach(self, plan: LessonPlan, reader: Reader, lesson: Lesson, hold_out: bool) -> None:
        """Learn the pictures of a plan; evaluation, calibration and warnings go into `lesson`."""
        if not self.facts.known and self.facts.templates != plan.templates:
            self.facts.templates = plan.templates
            self.restore(self.state())  # methods may need the number of templates when they are built
        method, facts, seen, labels = self.method, self.facts, self.method.seen, plan.pictures.labels
        train, held = torch.arange(len(labels)), torch.empty(0, dtype=torch.int64)
        if hold_out and method.implements("leave_one_out"):
            held = choose_left_out(labels)
        elif hold_out:
            train, held = split_held_out(labels)

        def pictures(rows: Tensor) -> Pictures:
            return reader.open(plan.pictures.subset(rows[torch.argsort(labels[rows], stable=True)]))

        new, known = pictures(train[labels[train] >= seen]), pictures(train[labels[train] < seen])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(facts.seed + SEED_STEP * facts.lessons)
            with follow_tower(method, self.held, new) as moves:
                if len(new):
                    method.learn(Task(len(method.sizes), list(lesson.new), new))
                    lesson.warnings += method.notes()
            if len(known):
                method.learn(Task(len(method.sizes), [], known))
        for move in moves:
            self.held = self.held.moved(move)
        now = datetime.datetime.now().astimezone()
        today = now.date().isoformat()
        facts.known += [KnownClass(name, name, today, 0, today) for name in lesson.new]
        facts.lessons, facts.sizes = facts.lessons + 1, list(method.sizes)
        self.taught = self.taught.with_rows(labels, plan.checksums)
        with self.trainer.phase("measuring"):
            self.held = measure(method, self.held, pictures(held), facts.names, lesson)
        for each, count in zip(facts.known, torch.bincount(labels[train], minlength=method.seen).tolist(), strict=True):
            each.pictures, each.newest = each.pictures + count, today if count else each.newest
        facts.calibration, found = lesson.calibration, lesson.evaluation
        facts.count_right(found)
        counts = (len(lesson.new), len(lesson.again), lesson.pictures, len(facts.known), found.pictures, found.right)
        facts.history.append(LessonRecord(now.isoformat(timespec="seconds"), *counts))

    def forget(self, index: int) -> None:
        """Remove class `index`, and calibrate again: scores change when there are fewer classes."""
        self.method.forget(index)
        self.method.lay_out()
        del self.facts.known[index]
        self.facts.sizes = list(self.method.sizes)
        self.held, self.taught = self.held.without(index), self.taught.without(index)
        logits, novelty = held_out_scores(self.method, self.held)
        self.facts.calibration = calibrate(logits, self.held.labels, self.method.score_scale, novelty)
        self.facts.count_right(self.evaluate())

    def evaluate(self) -> Evaluation:
        """Evaluate the method on the pictures kept for evaluation, of all lessons."""
        scores = held_out_scores(self.method, self.held)
        return evaluate_scores(*scores, self.held.labels, self.facts.names, self.facts.calibration)

    def scores(self, pictures: Iterable[Any]) -> Iterator[tuple[Any, Scores | UserError]]:
        """Each picture with its scores, or with the reason why it cannot be read."""
        if not self.facts.known:
            raise UserError("the model has learnt nothing yet; teach it first")
        return stream_scores(pictures, self.method)

    def check(self, folder: Path) -> None:
        """Weights that load may still be wrong: check that a picture gets finite scores and a finite novelty."""
        try:
            pixels = torch.zeros(1, *self.clip.preprocess.shape, device=self.method.device)
            with torch.no_grad():
                batch = TensorBatch(self.method.clip, pixels)
                logits, novelty = self.method.logits(batch), self.method.novelty(batch)
            fits = logits.shape == (1, len(self.facts.known)) and bool(torch.isfinite(logits).all())
            fits &= novelty is None or (novelty.shape == (1,) and bool(torch.isfinite(novelty).all()))
        except Exception as error:  # untrusted weights can break any step of any method
            raise UserError(f"the weights in {folder} do not fit its model ({type(error).__name__})") from error
        if not fits:
            raise UserError(f"the weights in {folder} do not fit its model; restore the folder from a copy")

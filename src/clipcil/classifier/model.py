"""The base class of `Classifier`: a method, its classes, the data kept of lessons, and how a lesson changes them."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipcil.classifier.facts import Facts, KnownClass
from clipcil.classifier.held_out import (
    HeldOut,
    choose_left_out,
    evaluate_scores,
    follow_tower,
    held_out_scores,
    measure,
    split_held_out,
)
from clipcil.classifier.lesson import LearnMonitor, Lesson, LessonRecord
from clipcil.classifier.predicting import Scores, stream_scores
from clipcil.classifier.scoring import Calibration, Evaluation, calibrate
from clipcil.classifier.sources import TEMPLATE
from clipcil.classifier.taught import TaughtPictures
from clipcil.classifier.wording import counted
from clipcil.clip import CLIP
from clipcil.clip.loading import MINI_1
from clipcil.data.dataset import Dataset
from clipcil.data.names import need_text, same_name
from clipcil.data.pictures import PictureSet
from clipcil.data.reader import Pictures, Reader, TensorBatch
from clipcil.data.tasks import Task
from clipcil.errors import UserError, nearest
from clipcil.methods.base import Method, build_method, method_state
from clipcil.settings import to_dict
from clipcil.training.device import make_fabric
from clipcil.training.trainer import Trainer

SEED_STEP = 1_000_003
"""Lesson k draws from seed + k · SEED_STEP: a large prime, so that the lessons of models with neighbouring seeds never
share a seed."""

State = tuple[Facts, dict[str, Tensor]]
"""The whole state of a model: the contents of `model.toml`, and the weights."""


@dataclass(frozen=True)
class _Plan:
    """The new pictures of a lesson, labelled with the model's class indices."""

    pictures: PictureSet
    checksums: Tensor


class TaughtModel:
    """The base class of `Classifier`. `_state` returns everything that lessons change, and `_set_state` restores it."""

    def _open(self, kind: type[Method], config: Any, clip: CLIP, backbone: str, seed: int, device: str) -> None:
        """Set up everything that no lesson changes."""
        self.seed, self.config, self.device = seed, config, device
        self._backbone = backbone
        self._monitor = LearnMonitor()
        self._trainer = Trainer(make_fabric(device, "32-true") if device != "cpu" else None, [self._monitor])
        self._kind, self._clip = kind, clip.to(self._trainer.device)
        self._source: tuple[Path, Facts] | None = None  # the folder it was loaded from, and what lay there
        self._previous: State | None = None
        self._templates: tuple[str, ...] = (TEMPLATE,)
        self._known: list[KnownClass] = []
        self._history: list[LessonRecord] = []
        self._lessons = 0
        self._held = HeldOut.empty(clip.config.dim, sum(clip.vision.level_sizes))
        self._taught = TaughtPictures.empty()
        self.calibration = Calibration()

    def __repr__(self) -> str:
        """`Classifier('strata', 'mini'): 5 classes from 2 lessons, accuracy 93 % of 30 pictures`."""
        known = counted(len(self._known), "class", "classes")
        text = f"Classifier({self._method.name!r}, {self._backbone!r}): {known}"
        if not self._history:
            return text
        right, total = sum(known.right for known in self._known), sum(known.held_out for known in self._known)
        told = f", accuracy {right / total:.0%} of {counted(total, 'picture')}" if total else ""
        return f"{text} from {counted(len(self._history), 'lesson')}{told}"

    def _repr_html_(self) -> str:
        """A table of the classes, for notebooks."""
        from markupsafe import Markup

        from clipcil.classifier.page import class_table

        return Markup("<p>{}</p>{}").format(repr(self), class_table(self._known))

    @property
    def classes(self) -> list[str]:
        """Names of the classes it knows, in the order in which they were learnt."""
        return [known.name for known in self._known]

    def _plan(self, dataset: Dataset, lesson: Lesson) -> _Plan:
        """Which pictures are new and which classes they belong to; raises before anything is learnt if one of the
        classes cannot be learnt."""
        counts = torch.bincount(dataset.train.labels, minlength=len(dataset.classes)).tolist()
        for name, pictures in zip(dataset.classes, counts, strict=True):
            if not pictures:
                raise UserError(f"no picture of class '{name}' can be read")
        found, new = self._find_all(dataset.classes), count(len(self._known))
        fresh = [name for name, place in zip(dataset.classes, found, strict=True) if place is None]
        places = [next(new) if place is None else place for place in found]
        labels = torch.tensor(places)[dataset.train.labels]
        with self._monitor.phase("comparing with pictures taught before"):
            rows, checksums, repeats = self._taught.find_repeats(dataset, labels, self.classes + fresh)
        if not len(rows):
            raise UserError(f"all {len(labels)} pictures were taught before; there is nothing new to learn")
        lesson.repeated = repeats.same
        lesson.warnings += repeats.elsewhere + self._old_names(fresh)
        learnt = torch.bincount(labels[rows], minlength=max(places) + 1).tolist()
        for name, place in zip(dataset.classes, places, strict=True):
            if learnt[place]:
                (lesson.again if place < len(self._known) else lesson.new)[name] = learnt[place]
        if lesson.again and not self._kind.implements("learn_again"):
            raise self._kind.cannot("learn_again")
        return _Plan(dataset.train.subset(rows, labels[rows]), checksums)

    def _teach(self, plan: _Plan, reader: Reader, lesson: Lesson, hold_out: bool) -> None:
        method, seen, labels = self._method, self._method.seen, plan.pictures.labels
        train, held = torch.arange(len(labels)), torch.empty(0, dtype=torch.int64)
        if hold_out and method.implements("leave_one_out"):
            held = choose_left_out(labels)
        elif hold_out:
            train, held = split_held_out(labels)

        def pictures(rows: Tensor) -> Pictures:
            return reader.open(plan.pictures.subset(rows[torch.argsort(labels[rows], stable=True)]))

        new, known = pictures(train[labels[train] >= seen]), pictures(train[labels[train] < seen])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + SEED_STEP * self._lessons)
            with follow_tower(method, self._held, new) as moves:
                if len(new):
                    method.learn(Task(len(method.sizes), list(lesson.new), new))
                    lesson.warnings += method.notes()
            if len(known):
                method.learn(Task(len(method.sizes), [], known))
        for move in moves:
            self._held = self._held.moved(move)
        today = datetime.date.today().isoformat()
        self._known += [KnownClass(name, name, today, 0, today) for name in lesson.new]
        self._taught = self._taught.with_pictures(labels, plan.checksums)
        self._lessons += 1
        with self._monitor.phase("measuring"):
            self._held = measure(method, self._held, pictures(held), self.classes, lesson)
        self.calibration = lesson.calibration
        self._remember(lesson, torch.bincount(labels[train], minlength=method.seen).tolist())

    def _remember(self, lesson: Lesson, trained_on: list[int]) -> None:
        """Record what each class was trained on, its accuracy, and the lesson."""
        found, now = lesson.evaluation, datetime.datetime.now().astimezone()
        for known, pictures in zip(self._known, trained_on, strict=True):
            known.pictures += pictures
            known.newest = now.date().isoformat() if pictures else known.newest
        self._count_right(found)
        counts = (len(lesson.new), len(lesson.again), lesson.pictures, len(self._known), found.pictures, found.right)
        self._history.append(LessonRecord(now.isoformat(timespec="seconds"), *counts))

    def _count_right(self, found: Evaluation) -> None:
        results = {result.name: (result.pictures, result.right) for result in found.classes}
        for known in self._known:
            known.held_out, known.right = results.get(known.name, (0, 0))

    def _forget(self, index: int) -> None:
        """Remove class `index`, and calibrate again: scores change when there are fewer classes."""
        self._method.forget(index)
        self._method.lay_out()
        del self._known[index]
        self._held, self._taught = self._held.without(index), self._taught.without(index)
        labels, (logits, novelty) = self._held.labels, held_out_scores(self._method, self._held)
        self.calibration = calibrate(logits, labels, self._method.score_scale, novelty)
        self._count_right(evaluate_scores(logits, novelty, labels, self.classes, self.calibration))

    def _scores(self, pictures: Iterable[Any]) -> Iterator[tuple[Any, Scores | UserError]]:
        """Each picture with its scores, or with the reason why it cannot be read."""
        if not self._known:
            raise UserError("the model has learnt nothing yet; teach it first")
        return stream_scores(pictures, self._method)

    def facts(self) -> Facts:
        """Everything about the model except its weights."""
        return Facts(
            method=self._kind.name,
            settings=to_dict(self.config),
            backbone=self._clip.pinned if self._backbone == self._clip.name else self._backbone,
            fingerprint=self._fingerprint(),
            seed=self.seed,
            templates=self._templates,
            lessons=self._lessons,
            sizes=list(self._method.sizes) if self._known else [],
            known=copy.deepcopy(self._known),
            calibration=self.calibration,
            history=list(self._history),
        )

    def _fingerprint(self) -> str:
        return f"{self._clip.fingerprint}/{self._clip.preprocess.fingerprint}"

    def _check_backbone(self, what: str, fingerprint: str) -> None:
        if self._fingerprint() != fingerprint:
            if fingerprint == MINI_1:
                raise UserError(
                    f"{what} was taught with version 1 of the backbone mini, which only clipcil 0.1 reads;"
                    " teach it again from its pictures"
                )
            raise UserError(
                f"{what} was taught with another backbone (fingerprint {fingerprint}) than '{self._backbone}' here"
                f" ({self._fingerprint()}); a model keeps its backbone: leave out --backbone, or give"
                " the path of its own"
            )

    def _check_prompts(self, dataset: Dataset) -> None:
        """Refuse class names that are too long for the backbone.

        Raises:
            UserError: One of them is.
        """
        sentences = [template.format(name) for name in dataset.classes for template in dataset.templates]
        self._clip.tokenizer(sentences)

    def _old_names(self, names: Sequence[str]) -> list[str]:
        """A line for each new class that has the former name of a class that was renamed.

        The folders of a later delivery may still have the old name. And a renamed class keeps its text, so that a
        method that reads class names has one text for both.
        """
        reads_names = self._kind.implements("check_names")
        why = "; if not, expect confusion: CLIP reads one text for both" if reads_names else ""
        before = {same_name(known.text): known.name for known in self._known}
        return [
            f"'{name}' is learnt as a new class, but '{before[same_name(name)]}' had this name before it was renamed;"
            f" if they are one class, undo this lesson and teach the pictures as '{before[same_name(name)]}'{why}"
            for name in names
            if same_name(name) in before
        ]

    def _find(self, name: str) -> int | None:
        """The class called `name`. CLIP reads everything in lower case, so case makes no difference."""
        return self._find_all([name])[0]

    def _find_all(self, names: Sequence[str]) -> list[int | None]:
        """As `_find`, for many names: each of the model's own is looked at once for all of them."""
        places: dict[str, int] = {}
        for index, known in enumerate(self._known):
            places.setdefault(same_name(known.name), index)
        return [places.get(same_name(need_text(name))) for name in names]

    def _need(self, name: str) -> int:
        index = self._find(name)
        if index is None:
            raise UserError(f"the model knows no class '{name}'{nearest(name, self.classes)}")
        return index

    def _check(self, folder: Path) -> None:
        """Weights that load may still be wrong: check that a picture gets finite scores and a finite novelty."""
        try:
            pixels = torch.zeros(1, *self._clip.preprocess.shape, device=self._method.device)
            with torch.no_grad():
                batch = TensorBatch(self._method.clip, pixels)
                logits, novelty = self._method.logits(batch), self._method.novelty(batch)
            wanted = [((1, len(self._known)), logits), ((1,), novelty)]
            fits = all(
                scores is None or (scores.shape == shape and bool(torch.isfinite(scores).all()))
                for shape, scores in wanted
            )
        except Exception as error:  # untrusted weights can break any step of any method
            raise UserError(f"the weights in {folder} do not fit its model ({type(error).__name__})") from error
        if not fits:
            raise UserError(f"the weights in {folder} do not fit its model; restore the folder from a copy")

    def _state(self) -> State:
        """A copy of all that lessons change."""
        if not self._known:
            return self.facts(), {}
        tensors = {**method_state(self._method)[0], **self._held.tensors(), **self._taught.tensors()}
        return self.facts(), {key: value.detach().clone() for key, value in tensors.items()}

    def _set_state(self, state: State) -> None:
        """Restore `state`; the method is built again."""
        facts, tensors = copy.deepcopy(state[0]), dict(state[1])
        self._templates, self._known, self._history = facts.templates, facts.known, facts.history
        self._lessons, self.calibration = facts.lessons, facts.calibration
        self._taught = TaughtPictures.take(tensors, len(self._known))
        self._held = HeldOut.take(tensors, len(self._known), self._clip.config.dim, sum(self._clip.vision.level_sizes))
        names = [known.text for known in self._known]
        with torch.random.fork_rng(devices=[]):
            kept = (tensors, {"names": names, "sizes": facts.sizes}) if names else None
            self._method = build_method(
                self._kind, self.config, self._clip, self._trainer, self.seed, self._templates, kept
            )

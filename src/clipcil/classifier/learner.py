"""A method with its classes and what is kept of lessons: the part of a `Classifier` that a lesson changes.

Some pictures are kept for evaluation: only their features are stored, and every lesson scores all of them again. They
are held out of training; or, where a method can compute leave-one-out scores, they are used for training like all
others and scored by leaving each one out, so that few pictures serve both purposes.
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.classifier.lesson import LearnMonitor, Lesson, find_new, former_names
from clipcil.classifier.predict import Scores, most_likely, score
from clipcil.classifier.scoring import ENOUGH, Answer, Evaluation, calibrate, evaluate_answers
from clipcil.classifier.state import KnownClass, LessonRecord, ModelState, PictureRows, TaughtPictures
from clipcil.clip import CLIP
from clipcil.data.dataset import Dataset
from clipcil.data.pictures import PictureSet
from clipcil.data.reader import Pictures, Reader
from clipcil.data.tasks import Task
from clipcil.errors import UserError
from clipcil.experiment.evaluate import EVALUATION_BATCH
from clipcil.methods.base import Method, build_method, method_state
from clipcil.methods.registry import find_method
from clipcil.settings import to_dict
from clipcil.training.device import make_fabric
from clipcil.training.trainer import Trainer
from clipcil.transport import paired_map

SEED_STEP = 1_000_003
"""Lesson k draws from seed + k · SEED_STEP: a large prime, so that the lessons of models with neighbouring seeds never
share a seed."""
FEWEST_TO_HOLD_OUT = 5
"""Minimum number of pictures of a class for some to be held out: with fewer, all are needed for training."""
MOST_HELD_OUT = 50
"""Maximum number of pictures of a class held out of one lesson: more would add little and cost training pictures."""
MOST_LEFT_OUT = 20
"""Maximum number of pictures of a class kept of one lesson where they are left out one by one instead of held out."""


def split_held_out(labels: Tensor, leave_one_out: bool = False) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows kept for evaluation, by the class (N,) of each picture.

    Of each class a tenth is held out, at least one and at most `MOST_HELD_OUT` pictures, spread evenly; of a class with
    fewer than `FEWEST_TO_HOLD_OUT` pictures none. With `leave_one_out` all are trained on and at most `MOST_LEFT_OUT`
    of each class kept; a single picture is not: without it the class would be unknown, and each such picture a mistake.
    """
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in torch.unique(labels).tolist():
        rows = torch.nonzero(labels == label).flatten()
        total = len(rows)
        if leave_one_out:
            count = min(MOST_LEFT_OUT, total) if total > 1 else 0
        else:
            count = min(MOST_HELD_OUT, max(1, total // 10)) if total >= FEWEST_TO_HOLD_OUT else 0
        held[rows[[(2 * i + 1) * total // (2 * count) for i in range(count)]]] = True
    train = torch.ones_like(held) if leave_one_out else ~held
    return torch.nonzero(train).flatten(), torch.nonzero(held).flatten()


class PixelsNeededError(Exception):
    """A method asked for the pixels of pictures of which only features are kept."""


class FeatureBatch:
    """A batch of pictures of which only the features are kept."""

    def __init__(self, held: HeldOut, method: Method) -> None:
        self.features, self.levels = held.features.to(method.device), held.levels.to(method.device)
        self.pooled = self.levels[:, -method.clip.config.vision.width :]

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

    @contextmanager
    def following(self, method: Method, pictures: Pictures) -> Iterator[None]:
        """Transport the features if the block changes the tower.

        The old pictures are gone, so the tower cannot encode them again. The map is fitted to the unit features of
        `pictures` before and after, as a method's own calibration of its stored statistics is.
        """
        if not (method.tunes_tower and len(self) and len(pictures)):
            yield
            return
        version, before = method.clip.version, normalize(pictures.features, dim=-1)
        yield
        if method.clip.version != version:
            move = paired_map(before, normalize(pictures.features, dim=-1))
            self.features = move(normalize(self.features, dim=-1).double()).float()
            self.carried = torch.ones_like(self.carried)


@torch.no_grad()
def held_out_scores(method: Method, held: HeldOut) -> Scores:
    """The scores of every picture kept for evaluation, each left out where the method can do that."""
    if not len(held):
        return Scores(torch.zeros(0, method.seen), None)
    batch = FeatureBatch(held, method)
    if method.implements("leave_one_out"):
        return Scores.on_cpu(*method.leave_one_out(batch, held.labels.to(method.device)))
    return score(method, batch)


class Learner:
    """A method, its classes, the pictures kept for evaluation, and the checksums of those taught."""

    def __init__(self, config: Any, clip: CLIP, device: str, state: ModelState) -> None:
        self.monitor = LearnMonitor()
        self.trainer = Trainer(make_fabric(device, "32-true") if device != "cpu" else None, [self.monitor])
        self.config, self.clip = config, clip.to(self.trainer.device)
        self.restore(state)

    def restore(self, state: ModelState) -> None:
        """Take over `state`; the method is built again."""
        facts, tensors, clip = copy.deepcopy(state.facts), dict(state.tensors), self.clip
        facts.backbone, facts.settings = clip.pinned, to_dict(self.config)
        facts.fingerprint = f"{clip.fingerprint}/{clip.preprocess.fingerprint}"
        tensors.pop("held_out", None)  # version 0.1 kept the scores of these pictures
        nothing, classes = torch.zeros(0, dtype=torch.int64), len(facts.known)
        self.taught = TaughtPictures(nothing, nothing).take(tensors, classes)
        self.held = HeldOut.empty(clip.config.dim, sum(clip.vision.level_sizes)).take(tensors, classes)
        shape = {"names": [known.text for known in facts.known], "sizes": facts.sizes}
        kept = (tensors, shape) if classes else None
        with torch.random.fork_rng(devices=[]):
            self.method = build_method(
                find_method(facts.method), self.config, clip, self.trainer, facts.seed, facts.templates, kept
            )
        self.facts = facts

    def state(self) -> ModelState:
        """A copy of everything that lessons change."""
        tensors = method_state(self.method)[0] if self.facts.known else {}
        tensors = {**tensors, **self.held.tensors(), **self.taught.tensors()}
        return ModelState(copy.deepcopy(self.facts), {key: value.detach().clone() for key, value in tensors.items()})

    def plan(self, dataset: Dataset, lesson: Lesson) -> tuple[PictureSet, Tensor]:
        """The new pictures of a dataset, labelled with the classes of the model, and their checksums.

        The lesson's `new`, `again`, `repeated` and `warnings` are filled in.
        """
        self.monitor.progress("comparing with pictures taught before", 0, 0)
        facts, method = self.facts, self.method
        counts = torch.bincount(dataset.train.labels, minlength=len(dataset.classes)).tolist()
        if 0 in counts:
            raise UserError(f"no picture of class '{dataset.classes[counts.index(0)]}' can be read")
        found = facts.find(dataset.classes)
        fresh = [name for name, place in zip(dataset.classes, found, strict=True) if place is None]
        new = iter(range(len(facts.known), len(facts.known) + len(fresh)))
        places = [next(new) if place is None else place for place in found]
        labels = torch.tensor(places)[dataset.train.labels]
        rows, checksums = find_new(dataset.train, labels, self.taught, facts.names + fresh, lesson)
        if not len(rows):
            raise UserError(f"all {len(labels)} pictures were taught before; there is nothing new to learn")
        lesson.warnings += former_names(fresh, facts, reads_names=method.implements("check_names"))
        learnt = torch.bincount(labels[rows], minlength=max(places) + 1).tolist()
        for name, place in zip(dataset.classes, places, strict=True):
            if learnt[place]:
                (lesson.again if place < len(facts.known) else lesson.new)[name] = learnt[place]
        if lesson.again and not method.implements("learn_again"):
            raise method.cannot("learn_again")
        return dataset.train.subset(rows, labels[rows]), checksums

    def teach(self, dataset: Dataset, lesson: Lesson, hold_out: bool) -> None:
        """Learn the new pictures of a dataset; what was learnt, its evaluation and warnings go into `lesson`."""
        pictures, checksums = self.plan(dataset, lesson)
        if not self.facts.known and self.facts.templates != dataset.templates:
            self.facts.templates = dataset.templates
            self.restore(self.state())  # methods may need the number of templates when they are built
        method, facts, seen, labels = self.method, self.facts, self.method.seen, pictures.labels
        train, held = torch.arange(len(labels)), torch.empty(0, dtype=torch.int64)
        if hold_out:
            train, held = split_held_out(labels, method.implements("leave_one_out"))
        with closing(Reader(method.clip, None, method.device)) as reader:  # no picture stays on disk
            reader.on_progress = self.monitor.progress

            def opened(rows: Tensor) -> Pictures:
                return reader.open(pictures.subset(rows[torch.argsort(labels[rows], stable=True)]))

            new, known = opened(train[labels[train] >= seen]), opened(train[labels[train] < seen])
            with torch.random.fork_rng(devices=[]), self.held.following(method, new):
                torch.manual_seed(facts.seed + SEED_STEP * facts.lessons)
                if len(new):
                    method.learn(Task(len(method.sizes), list(lesson.new), new))
                    lesson.warnings += method.notes()
                if len(known):
                    method.learn(Task(len(method.sizes), [], known))
            now = datetime.datetime.now().astimezone()
            today = now.date().isoformat()
            facts.known += [KnownClass(name, name, today, 0, today) for name in lesson.new]
            facts.lessons, facts.sizes = facts.lessons + 1, list(method.sizes)
            self.taught = self.taught.with_rows(labels, checksums)
            self.monitor.progress("measuring", 0, 0)
            self.measure(opened(held), lesson)
        for each, count in zip(facts.known, torch.bincount(labels[train], minlength=method.seen).tolist(), strict=True):
            each.pictures, each.newest = each.pictures + count, today if count else each.newest
        found = lesson.evaluation
        counts = (len(lesson.new), len(lesson.again), lesson.pictures, len(facts.known), found.pictures, found.right)
        facts.history.append(LessonRecord(now.isoformat(timespec="seconds"), *counts))
        self.monitor.check()  # the last stage may take long, and tells no progress

    @torch.no_grad()
    def measure(self, newest: Pictures, lesson: Lesson) -> None:
        """Keep the pictures of this lesson (`newest`) for evaluation, and score those of all lessons."""
        method, names = self.method, self.facts.names
        lesson.left_one_out = method.implements("leave_one_out")
        lesson.held_out = 0 if lesson.left_one_out else len(newest)
        labels = newest.labels.cpu()
        if len(newest):
            features, levels = newest.features.cpu(), newest.levels.cpu()
            self.held = self.held.with_rows(labels, features, levels, torch.zeros(len(newest), dtype=torch.bool))
        try:
            labels, scores = self.held.labels, held_out_scores(method, self.held)
        except PixelsNeededError:
            self.held = HeldOut.empty(self.held.features.shape[1], self.held.levels.shape[1])
            logits = [score(method, batch).logits for batch in newest.batches(EVALUATION_BATCH)]
            scores = Scores(torch.cat(logits) if logits else torch.zeros(0, method.seen), None)
            lesson.warnings.append(
                f"{method.title} reads the pixels of a picture, not its features, so the accuracy and the threshold are"
                " based only on the pictures held out of this lesson"
            )
        lesson.evaluation = self._calibrate(scores, labels)
        lesson.calibration = self.facts.calibration
        if len(names) == 1:
            lesson.warnings.append(
                f"the model knows one class, so it predicts '{names[0]}' for every picture; teach it another class"
            )
        elif len(labels) < ENOUGH:
            lesson.warnings.append(
                f"{len(labels)} pictures kept for evaluation are too few (fewer than {ENOUGH}) to detect unknown"
                " ones, so none is called 'none of these' yet"
            )

    def forget(self, index: int) -> None:
        """Remove class `index`, and calibrate again: scores change when there are fewer classes."""
        self.method.forget(index)
        self.method.lay_out()
        del self.facts.known[index]
        self.facts.sizes = list(self.method.sizes)
        self.held, self.taught = self.held.without(index), self.taught.without(index)
        self._calibrate(held_out_scores(self.method, self.held), self.held.labels)

    def _calibrate(self, scores: Scores, labels: Tensor) -> Evaluation:
        """Set temperature and threshold by the scores of labelled pictures, and evaluate the method on them."""
        self.facts.calibration = calibrate(scores.logits, labels, self.method.score_scale, scores.novelty)
        found = self.evaluate(scores, labels)
        results = {result.name: (result.pictures, result.right) for result in found.classes}
        for known in self.facts.known:
            known.held_out, known.right = results.get(known.name, (0, 0))
        return found

    def evaluate(self, scores: Scores, labels: Tensor) -> Evaluation:
        """Evaluate the method on the scores of labelled pictures."""
        names, how = self.facts.names, self.facts.calibration
        found = (most_likely(logits, novelty, names, 2, how) for logits, novelty in scores)
        answers = (
            Answer(names[label], guess.answer_to(names[label]), guess.probabilities[0], guess.unknown)
            for label, guess in zip(labels.tolist(), found, strict=True)
        )
        return evaluate_answers(answers, names)

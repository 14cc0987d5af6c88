"""P2: one task, learnt and measured, of seven methods whose towers are frozen.

Peers: every step decodes its pictures, preprocesses and encodes them, exemplars too; after the task the test pictures
of all classes seen are encoded. Ours: a training picture is encoded once, a test picture of an old task not again. The
methods' own code runs on both sides (see `Live`), with their own epochs. The peers' side multiplies by torch's own
BLAS, and CoOp's peers also run all tokens of the context for every class. The fourth task of the embedded pictures,
three classes of four pictures, and a fourth as many test pictures, as most datasets have; towers of the shape of
ViT-B/32, whose pictures cost a fourth of ViT-B/16's arithmetic, so that the ratios are rather too small.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.harness import Row, difference, usual_products, versus
from benchmarks.p1_prompt_step import encode_padded
from benchmarks.shapes import B16_TEXT, SMALL_TEXT, SMALL_VISION, random_clip
from clipcil.clip import CLIP
from clipcil.clip.config import VisionConfig
from clipcil.data.dataset import open_dataset
from clipcil.data.pictures import PictureSet
from clipcil.data.reader import Pictures, Reader
from clipcil.data.tasks import Task, TaskStream, class_order, task_sizes
from clipcil.experiment.evaluate import EVALUATION_BATCH
from clipcil.experiment.spec import RunSpec, method_settings
from clipcil.memory.exemplars import ExemplarMemory
from clipcil.methods.base import Method
from clipcil.methods.registry import find_method
from clipcil.prompts.templates import encode_classes
from clipcil.training.trainer import Trainer

NUMBER = 3
"""Which task is timed, from 0."""
METHODS = {"rapf": "adapter", "proof": "train", "engine": "adapters", "coop": "train", "coda-prompt": "train"}
"""Each method that trains with the name of its training stage."""
GOALS = {"simplecil": 2.0, "ranpac": 5.0, "coda-prompt": 3.0}
"""Goals of methods with little to save; 10 for the others."""


class Live:
    """Features (N, dim) as the peers have them: reading rows decodes and encodes those pictures.

    Functions that work row by row (normalise, scale, change the dtype) may be applied to it; they are applied to the
    rows when these are read. So a method's own training code runs on it unchanged, re-encoding every batch.
    """

    def __init__(self, fetch: Callable[[Tensor], Tensor], count: int, dim: int) -> None:
        self.fetch, self.shape, self.device = fetch, torch.Size((count, dim)), torch.device("cpu")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.fetch(torch.nonzero(rows).flatten() if rows.dtype == torch.bool else rows)

    def double(self) -> Live:
        return Live(lambda rows: self.fetch(rows).double(), *self.shape)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Live:
        like = next(value for value in args if isinstance(value, Live))

        def fetch(rows: Tensor) -> Tensor:
            result: Tensor = function(*(v.fetch(rows) if isinstance(v, Live) else v for v in args), **(kwargs or {}))
            return result

        return Live(fetch, *like.shape)


class LivePictures:
    """Rows of picture sets for a method to learn from, nothing kept. Threads decode, as the peers' loaders do."""

    def __init__(self, clip: CLIP, sets: Sequence[PictureSet], rows: Sequence[Tensor], labels: Tensor) -> None:
        self.clip, self.labels = clip, labels
        self._where = [(part, int(row)) for part, own in zip(sets, rows, strict=True) for row in own]
        self._pool = ThreadPoolExecutor(4)

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, rows: Tensor) -> Any:
        return SimpleNamespace(pixels=self.pixels(rows))

    @property
    def features(self) -> Live:
        return Live(lambda rows: self.encode(rows).features, len(self), self.clip.config.dim)

    @property
    def pooled(self) -> Live:
        return Live(lambda rows: self.encode(rows).pooled, len(self), self.clip.config.vision.width)

    @torch.no_grad()
    def pixels(self, rows: Tensor) -> Tensor:
        def decode(row: int) -> Tensor:
            part, place = self._where[row]
            return self.clip.preprocess.picture(part.image(place))

        batch = torch.stack(list(self._pool.map(decode, rows.tolist())))
        return self.clip.preprocess.finish(batch).half().float()  # rounded as the cache rounds, to compare the results

    @torch.no_grad()
    def encode(self, rows: Tensor) -> Any:
        return self.clip.vision(self.pixels(rows), class_only=True)

    def batches(self, size: int) -> Iterator[Any]:
        """For evaluation: one fresh pass gives all that is asked of a batch."""
        for rows in torch.split(torch.arange(len(self)), size):
            output = self.encode(rows)
            asked = {"features": output.features, "pooled": output.pooled, "levels": output.levels}
            yield SimpleNamespace(**asked, pixels=self.pixels(rows), labels=self.labels[rows])


class OneTask:
    """A method that stands before its fourth task, having seen the tasks before it."""

    def __init__(
        self, name: str, clip: CLIP, known: Reader | None = None, epochs: int | None = None, **settings: Any
    ) -> None:
        dataset = open_dataset("emoji").shrink(4, 0)
        order = class_order("seed:1993", dataset.classes)
        tested = [int((dataset.test.labels == label).nonzero()[0]) for label in order]
        dataset = replace(dataset, test=dataset.test.subset(torch.tensor(tested)))
        self.clip, self.stage = clip, METHODS.get(name)
        self.reader = Reader(clip, None, shared=True)
        if known is not None:  # pictures of earlier tasks are encoded already
            self.reader._tables.update(known._tables)
        self.stream = TaskStream(dataset, self.reader, order, task_sizes(len(dataset.classes), increment=3))
        config = method_settings(RunSpec(method=name, data="emoji"), settings)
        if epochs is not None:
            config = self._with_epochs(config, epochs)
        torch.manual_seed(0)
        self.method: Method = find_method(name)(config, clip, Trainer(), dataset.templates)
        self._seen: list[tuple[PictureSet, Tensor]] = []
        stream = self.stream.tasks()
        self.method.config = self._with_epochs(config, 0)  # what came before needs to be there, not to be good
        for task in itertools.islice(stream, NUMBER):
            self._seen.append((task.pictures._set, task.pictures.features))
            self.method.learn(task)
            for batch in self._test(task.index):
                self.method.logits(batch)
        self.method.config = config
        self._stream, self.task = stream, next(stream)  # the iterator is kept: it closes the task when it goes

    def _with_epochs(self, config: Any, epochs: int) -> Any:
        if self.stage is None:
            return config
        return replace(config, **{self.stage: replace(getattr(config, self.stage), epochs=epochs, steps=0)})

    def _test(self, index: int) -> Iterator[Pictures]:
        return self.stream.test(index).batches(EVALUATION_BATCH)

    def ours(self) -> Tensor:
        """Learn the task and score all test pictures: (N, C)."""
        return self._learn(self.task, [batch for i in range(self.task.index + 1) for batch in self._test(i)])

    def theirs(self) -> Tensor:
        """The same, with features that are never kept."""
        own, method = self.task.pictures, cast(Any, self.method)
        pictures: Any = self._live([own._set], own.labels)
        if self.stage is None:  # nothing is trained: one pass
            pictures = SimpleNamespace(**pictures.encode(torch.arange(len(own)))._asdict(), labels=own.labels)
        task = Task(self.task.index, self.task.names, pictures)
        if isinstance(getattr(method, "memory", None), ExemplarMemory):
            method.memory.join = self._join
        if method.name == "engine":
            method.noisy_views = partial(_LiveViews, noise=method.config.pixel_noise)
        if method.name == "coop":
            method.texts = partial(_texts_of_all_tokens, method)
        tests = [self.stream.test_set(i) for i in range(task.index + 1)]
        live = self._live(tests, torch.cat([part.labels for part in tests]))
        return self._learn(task, live.batches(EVALUATION_BATCH))

    def _learn(self, task: Task, test: Any) -> Tensor:
        torch.manual_seed(1)
        self.method.train()
        self.method.learn(task)
        self.method.eval()
        with torch.no_grad():
            return torch.cat([self.method.logits(batch) for batch in test])

    def _live(self, sets: list[PictureSet], labels: Tensor, rows: list[Tensor] | None = None) -> LivePictures:
        return LivePictures(self.clip, sets, rows or [torch.arange(len(part)) for part in sets], labels)

    def _join(self, features: Any, labels: Tensor) -> Any:
        """D_k ∪ exemplars as pictures: which they were is found by their features."""
        memory: Any = self.method.memory
        sets, rows = [self.task.pictures._set], [torch.arange(len(labels))]
        for exemplar in memory.features:
            for part, known in self._seen:
                found = torch.nonzero((known == exemplar).all(1)).flatten()[:1]
                if len(found):
                    sets.append(part)
                    rows.append(found)
                    break
        both = torch.cat([labels, memory.labels])
        return self._live(sets, both, rows).features, both


class _LiveViews:
    """ENGINE's noisy pictures, made and encoded anew for every step: `views[view, rows]`."""

    def __init__(self, pictures: LivePictures, noise: float) -> None:
        self.pictures, self.noise = pictures, noise

    def __len__(self) -> int:
        return 1

    def __getitem__(self, which: tuple[Tensor, Tensor]) -> Tensor:
        vision = self.pictures.clip.vision
        with torch.no_grad():
            inputs = vision.start(self.pictures.pixels(which[1]))
            noisy = vision.encode(inputs + self.noise * torch.randn_like(inputs))
        return normalize(noisy.features, dim=-1)


def _texts_of_all_tokens(method: Any) -> Tensor:
    """CoOp's class texts with every token of the context, the shared beginning once for each class."""
    return normalize(encode_padded(method.clip, *method.class_texts(method.context)), dim=-1)


def compare(name: str, clip: CLIP, known: Reader, epochs: int | None = None, **settings: Any) -> Row:
    """Both sides of one method, each from the state before the task: earlier pictures encoded, none of its own."""
    seconds, results = {}, {}
    for side in ("theirs", "ours"):
        task = OneTask(name, clip, known, epochs, **settings)
        start = time.perf_counter()
        with usual_products() if side == "theirs" else nullcontext():
            results[side] = getattr(task, side)()
        seconds[side] = time.perf_counter() - start
        task.reader.close()
    trained = f", {getattr(task.method.config, task.stage).epochs} epochs" if task.stage else ""
    # ENGINE's noise is drawn anew for each step by its authors and once a task by us: no equal result to compare.
    views = name == "engine" and task.method.config.image_weight > 0
    same = {} if views else {"error": difference(results["ours"], results["theirs"]), "tolerance": 1e-3}
    step = f"{task.method.title}{' with noisy views' * views}: a task learnt and measured{trained}"
    return versus("P2", step, seconds, GOALS.get(name, 10.0), **same)


def near_pairs(clip: CLIP) -> float:
    """RAPF's threshold that takes 1 % of all pairs of classes: a random text tower has distances of its own."""
    texts = encode_classes(clip, open_dataset("emoji").classes[:40], ["a good photo of a {}."])
    return float(torch.pdist(texts).quantile(0.01))


def run(quick: bool) -> list[Row]:
    clip = random_clip(SMALL_VISION, SMALL_TEXT) if quick else random_clip(VisionConfig(), B16_TEXT)
    epochs = 1 if quick else None
    own: list[tuple[str, dict[str, Any]]] = [
        ("rapf", {"threshold": near_pairs(clip)}),
        ("proof", {}),
        ("engine", {"image_weight": 0.0}),  # as its authors run UCF-101
        ("engine", {"image_weight": 0.5}),  # as CIFAR-100
        ("coop", {}),
        *((name, {}) for name in GOALS),
    ]
    known = OneTask("rapf", clip).reader
    rows = [compare(name, clip, known, epochs, **settings) for name, settings in own]
    rows[2].note = "ten epochs and two passes for statistics against one pass: 10 is about the most there can be"
    rows[3].note = "noisy pictures are work that no cache saves: the peers encode one a step, we two a picture and task"
    return rows

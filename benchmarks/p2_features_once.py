"""P2: one task, learnt and measured, of four methods whose towers are frozen.

Peers: every step decodes its pictures, preprocesses and encodes them, exemplars too; after the task the test pictures
of all classes seen are encoded. Ours: a training picture is encoded once, a test picture of an old task not again. The
methods' own code runs on both sides (see `live`), with their own epochs; CoOp's peers also run all tokens of the
context for every class. The fifth of ten tasks, embedded pictures and backbone, so that decoding, trunk, tower and
training are all real.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.harness import Row, difference, versus
from benchmarks.live import LivePictures
from benchmarks.p1_prompt_step import encode_padded
from clipcil.clip import CLIP, load_clip
from clipcil.data.dataset import open_dataset
from clipcil.data.orders import class_order
from clipcil.data.pictures import PictureSet
from clipcil.data.reader import Pictures, Reader
from clipcil.data.stream import Task, TaskStream, task_sizes
from clipcil.engine.evaluate import BATCH
from clipcil.engine.spec import RunSpec, method_settings
from clipcil.memory.exemplars import ExemplarMemory
from clipcil.methods.base import Method
from clipcil.methods.registry import find_method
from clipcil.methods.training import Session

METHODS = {"rapf": "adapter", "proof": "train", "engine": "adapters", "coop": "train"}
"""Each method with the name of its training stage."""


class OneTask:
    """A method that stands before task `number` (from 0), having seen the tasks before it."""

    def __init__(
        self, name: str, number: int, clip: CLIP, cache: Path, epochs: int | None = None, **settings: Any
    ) -> None:
        dataset = open_dataset("emoji", None, {})
        self.clip, self.stage = clip, METHODS[name]
        self.reader = Reader(clip, cache)
        order = class_order("seed:1993", dataset.classes)
        self.stream = TaskStream(dataset, self.reader, order, task_sizes(len(dataset.classes)))
        config = method_settings(RunSpec(method=name, data="emoji"), settings)
        if epochs is not None:
            config = self._with_epochs(config, epochs)
        torch.manual_seed(0)
        self.method: Method = find_method(name)(config, clip, Session())
        self.method.templates = dataset.templates
        self._seen: list[tuple[PictureSet, Tensor]] = []
        tasks = self.stream.tasks()
        self.method.config = self._with_epochs(config, 0)  # what came before needs to be there, not to be good
        for task in itertools.islice(tasks, number):
            self._seen.append((task.pictures._set, task.pictures.features))
            self.method.learn(task)
            for batch in self._test(task.index):
                self.method.logits(batch)
        self.method.config = config
        self._tasks, self.task = tasks, next(tasks)  # the iterator is kept: it closes the task when it goes

    def _with_epochs(self, config: Any, epochs: int) -> Any:
        return replace(config, **{self.stage: replace(getattr(config, self.stage), epochs=epochs)})

    def _test(self, index: int) -> Iterator[Pictures]:
        return self.stream.test(index).batches(BATCH)

    def ours(self) -> Tensor:
        """Learn the task and score all test pictures: (N, C)."""
        return self._learn(self.task, [batch for i in range(self.task.index + 1) for batch in self._test(i)])

    def theirs(self) -> Tensor:
        """The same, with features that are never kept."""
        own = self.task.pictures
        task = Task(self.task.index, self.task.names, self._live([own._set], own.labels))  # type: ignore[arg-type]
        method: Any = self.method
        if isinstance(getattr(method, "memory", None), ExemplarMemory):
            method.memory.join = self._join
        if method.name == "engine":
            method.noisy_views = partial(_LiveViews, noise=method.config.pixel_noise)
        if method.name == "coop":
            method.texts = partial(_texts_of_all_tokens, method)
        tests = [self.stream.test_set(i) for i in range(task.index + 1)]
        return self._learn(task, self._live(tests, torch.cat([part.labels for part in tests])).batches(BATCH))

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
        pixels = self.pictures.pixels(which[1])
        with torch.no_grad():
            noisy = self.pictures.clip.vision(pixels + self.noise * torch.randn_like(pixels))
        return normalize(noisy.features, dim=-1)


def _texts_of_all_tokens(method: Any) -> Tensor:
    """CoOp's class texts with every token of the context, the shared beginning once for each class."""
    return normalize(encode_padded(method.clip, *method.class_texts(method.context)), dim=-1)


def compare(
    name: str, clip: CLIP, number: int, folder: Path, repeats: int = 1, epochs: int | None = None, **settings: Any
) -> Row:
    """Both sides of one method, each from the state before the task: earlier pictures in the cache, none of its own."""
    seconds: dict[str, list[float]] = {"theirs": [], "ours": []}
    results = {}
    before = folder / f"before {number}"
    if not before.is_dir():
        OneTask("rapf", number, clip, before)
    for _ in range(repeats):
        for side in seconds:
            with tempfile.TemporaryDirectory() as own:
                cache = shutil.copytree(before, Path(own) / "cache")
                task = OneTask(name, number, clip, cache, epochs, **settings)
                start = time.perf_counter()
                results[side] = getattr(task, side)()
                seconds[side].append(time.perf_counter() - start)
    config = getattr(task.method.config, task.stage)
    random_views = name == "engine" and task.method.config.image_weight > 0
    # ENGINE's noise is drawn anew for each step by its authors and once a task by us: no equal result to compare.
    same = {} if random_views else {"error": difference(results["ours"], results["theirs"]), "tolerance": 1e-3}
    step = f"{task.method.title}, task {number + 1} of 10, {config.epochs} epochs"
    return versus("P2", step, {side: statistics.median(values) for side, values in seconds.items()}, 10.0, **same)


def run(quick: bool) -> list[Row]:
    clip, rows = load_clip("mini"), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for method in METHODS:
            row = compare(method, clip, 1, folder, epochs=1) if quick else compare(method, clip, 4, folder)
            if row.error is None:
                check = compare(method, clip, 1, folder, epochs=1, image_weight=0.0)
                row.error, row.tolerance = check.error, check.tolerance
                row.note = "results compared without the noisy views, which are random"
            rows.append(row)
    return rows

"""P7: the cost of a task as classes are added: 100 tasks of 10 classes of synthetic features, d = 512.

DMC-OT's own code learns tasks 2, 10, 50 and 100 (one epoch of stage 2, statistics, map, transport, prompts, memory);
the tasks between are added without training. The tower is frozen (stage 1 has no epoch) because made-up features
have no pictures. Where the old prompts are frozen the text tower has the shape of ViT-B/16's, as d has. Where they
train, it has the shape of the embedded one: 1,000 classes through the large one take minutes a step on two cores, and
only the constant would differ.
"""

import copy
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.harness import Row, bytes_of, duration
from benchmarks.p3_memory import near_identity
from benchmarks.shapes import B16_TEXT, MINI_TEXT, SMALL_TEXT, SMALL_VISION, names, random_clip
from clipcil.clip.config import TextConfig
from clipcil.data.tasks import Task
from clipcil.memory.gaussians import GaussianMemory
from clipcil.methods.dmc import DMCOT, DMCOTConfig
from clipcil.training.augment import TowerTraining
from clipcil.training.trainer import Callback, Trainer, Training

CLASSES = 10
"""New classes of each task."""


class MadeUp:
    """Features and labels without pictures; each reading moves the features a little, as a tuned tower would."""

    key = "made up"

    def __init__(self, first: int, classes: int, count: int, dim: int) -> None:
        centres = torch.randn(classes, 1, dim)
        self._features = (centres + 0.5 * torch.randn(classes, count, dim)).flatten(0, 1)
        self.labels = torch.arange(first, first + classes).repeat_interleave(count)

    @property
    def features(self) -> Tensor:
        self._features = self._features + 0.01 * torch.randn_like(self._features)
        return self._features

    def __len__(self) -> int:
        return len(self.labels)


class Calibration(Callback):
    """Seconds of the phase `calibration`."""

    seconds = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += (name == "calibration") * (time.perf_counter() - start)


class Growth:
    """A DMC-OT that classes can be added to quickly, and whose next task can be timed."""

    def __init__(self, dim: int, text: TextConfig, train_old: bool) -> None:
        torch.manual_seed(0)
        self.dim, stages = dim, {"stage1": TowerTraining(epochs=0), "stage2": Training(epochs=1, lr=2e-3)}
        config = DMCOTConfig(**stages, train_old_prompts=train_old)
        self.method = DMCOT(config, random_clip(SMALL_VISION, text, dim), Trainer(callbacks=[Calibration()]))
        self.transports: dict[int, float] = {}
        """Seconds of one transport by the number of spaces it carried."""

    def task(self) -> Task:
        seen, number = self.method.seen, len(self.method.sizes)
        pictures: Any = MadeUp(seen, CLASSES, 30, self.dim)
        return Task(number, names(seen + CLASSES)[seen:], pictures)

    def skip(self, carry: bool = True) -> None:
        """Add the state of one more task without training; unless `carry`, the tower did not move."""
        task, method = self.task(), self.method
        method.grow(task.names)
        if carry and len(method.memory):
            map = near_identity(self.dim)
            start = time.perf_counter()
            method.memory.transport(map)
            self.transports[len(method.memory.matrices)] = time.perf_counter() - start
        method.memory.add(method.class_features(task.pictures, "after"))
        method.classifier = normalize(torch.randn_like(method.classifier), dim=-1)
        method.task_texts = normalize(torch.randn_like(method.task_texts), dim=-1)

    def learn(self) -> tuple[float, float]:
        """Seconds of the next task without its calibration, and of the calibration; on a copy."""
        method, task = copy.deepcopy(self.method), self.task()
        start = time.perf_counter()
        method.learn(task)
        total = time.perf_counter() - start
        calibration = method.trainer.callbacks[0].seconds  # type: ignore[attr-defined]
        return total - calibration, calibration

    def bytes(self) -> int:
        return bytes_of(value for key, value in self.method.state_dict().items() if not key.startswith("tower."))


def transport_seconds(spaces: int, classes: int, dim: int) -> float:
    """One transport of a memory of `spaces` spaces with `classes` classes each, best of three."""
    memory = GaussianMemory()
    for _ in range(spaces):
        memory.transport(near_identity(dim))
        memory.add([torch.randn(4, dim).double() for _ in range(classes)])
    found = []
    for _ in range(4):
        map = near_identity(dim)
        start = time.perf_counter()
        memory.transport(map)
        found.append(time.perf_counter() - start)
    return min(found)


def run(quick: bool) -> list[Row]:
    marks, dim, text = ((2, 4), 64, SMALL_TEXT) if quick else ((2, 10, 50, 100), 512, B16_TEXT)
    frozen, trained = Growth(dim, text, train_old=False), Growth(dim, MINI_TEXT, train_old=True)
    sides: tuple[dict[int, float], dict[int, float]] = {}, {}
    maps, sizes = {}, {}
    trained.learn()  # the first task of a process takes longer
    for number in range(1, max(marks) + 1):
        if number in marks:
            sides[0][number], maps[number] = frozen.learn()
            sides[1][number], _ = trained.learn()
        frozen.skip()
        trained.skip(carry=False)
        sizes[number] = frozen.bytes()
    early, last = marks[len(marks) // 2 - 1], marks[-1]
    rows = []
    goals = ("old prompts frozen", 0.15, "flat"), ("old prompts training", 1.1, "≤ linear")
    for seconds, (what, most, goal) in zip(sides, goals, strict=True):
        power = math.log(seconds[last] / seconds[early]) / math.log(last / early)  # of seconds ≈ a·tasksᵖ
        step = f"tasks {_list(marks)} of {CLASSES} classes, d={dim}, {what}"
        result = f"{seconds[last] / seconds[early]:.2f}× from task {early}"
        note = f"seconds ∝ tasks^{power:.2f} from task {early} to {last}; calibration is the next line"
        details = {"seconds": seconds, "power": power}
        times = _list(map(duration, seconds.values()))
        rows.append(Row("P7", step, "", times, result, goal, power <= most, note=note, details=details))
    few, many = transport_seconds(4, 2, dim), transport_seconds(4, 50, dim)
    product = max((spaces, seconds / spaces) for spaces, seconds in frozen.transports.items())[1]
    step = f"calibration of tasks {_list(marks)}; transport of 50 classes a task against 2"
    times, result = _list(map(duration, maps.values())), f"{many / few:.2f}×"
    note = f"two eigendecompositions, and one product a task: {duration(product)} each"
    details = {"calibration": maps, "transport": frozen.transports, "few": few, "many": many}
    rows.append(Row("P7", step, "", times, result, "no classes·d³", many / few < 2, note=note, details=details))
    per_class = {mark: sizes[mark] / (mark * CLASSES) for mark in marks}
    level = per_class[last] / per_class[early]
    kilobytes = _list(f"{value / 1e3:.0f} kB" for value in per_class.values())
    result, details = f"{level:.2f}× from task {early}", {"bytes": sizes}
    rows.append(Row("P7", "bytes of state per class", "", kilobytes, result, "flat", level < 1.2, details=details))
    return rows


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))

"""`python -m reproduce.fidelity --data-root DIR`: whole runs of four baselines, ours beside the published loops.

CIFAR-100, 50 training pictures per class, 4 tasks, order of seed 1993. A published loop is scored twice: as its code
scores, in batches of test pictures of one class or task, and one picture at a time, as every method here does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clipcil.clip import load_clip
from clipcil.data.dataset import Dataset, open_dataset
from clipcil.data.reader import Reader
from clipcil.data.tasks import TaskStream, class_order, task_sizes
from clipcil.experiment.spec import RunSpec, method_settings
from clipcil.methods.registry import find_method
from clipcil.storage import cache_folder
from clipcil.training.trainer import Trainer
from reproduce.fidelity import clap4clip, engine, proof, rapf
from reproduce.fidelity.stream import Features, Part, accuracy

SUBSET = 777
"""Seed of the training pictures that are drawn; the same for all runs."""
PUBLISHED: dict[str, Callable[[Features, Any], tuple[float, float]]] = {
    "proof": proof.run,
    "rapf": rapf.run,
    "clap4clip": clap4clip.run,
    "engine": engine.run,
}
LIMIT = 1.5
"""Points by which a mean over the seeds may differ."""


@dataclass
class Line:
    method: str
    batched: list[float]
    """The published loop, scored in its test batches."""
    alone: list[float]
    """The same weights, one test picture at a time."""
    ours: list[float]

    def cells(self) -> tuple[str, ...]:
        apart = statistics.mean(self.ours) - statistics.mean(self.alone)
        three = (" / ".join(f"{value:.1f}" for value in values) for values in (self.batched, self.alone, self.ours))
        return (self.method, *three, f"{apart:+.1f}", "within" if abs(apart) <= LIMIT else "APART")


HEADER = ("method", "published, its batches", "published, one by one", "ours", "difference", f"± {LIMIT}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m reproduce.fidelity", description=__doc__)
    parser.add_argument("--data-root", type=Path, required=True, help="folder with CIFAR-100")
    parser.add_argument("--backbone", default="mini")
    parser.add_argument("--per-class", type=int, default=50, help="training pictures of each class")
    parser.add_argument("--test-per-class", type=int, default=100, help="test pictures of each class")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], metavar="SEED", help="seeds that are run")
    parser.add_argument("--only", default=",".join(PUBLISHED), help="some of them, such as proof,engine")
    given = parser.parse_args()
    clip = load_clip(given.backbone)
    data = open_dataset("cifar100", given.data_root).shrink(given.per_class, SUBSET)
    data = first_tests(data, given.test_per_class)
    sizes = task_sizes(len(data.classes), given.tasks)
    stream = TaskStream(data, Reader(clip, cache_folder(), shared=True), class_order("seed:1993", data.classes), sizes)
    features = Features.read(clip, stream, data.templates)
    lines = [compare(name, given.seeds, features, stream, given.backbone) for name in given.only.split(",")]
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER))
    for line in lines:
        print("| " + " | ".join(line.cells()) + " |")
    return int(any(line.cells()[-1] == "APART" for line in lines))


def compare(name: str, seeds: list[int], features: Features, stream: TaskStream, backbone: str) -> Line:
    config = method_settings(RunSpec(method=name, data="cifar100", backbone=backbone), {})
    line = Line(find_method(name).title, [], [], [])
    for seed in seeds:
        start = time.perf_counter()
        torch.manual_seed(seed)
        batched, alone = PUBLISHED[name](features, config)
        torch.manual_seed(seed)
        own = ours(name, config, features, stream)
        line.batched.append(batched)
        line.alone.append(alone)
        line.ours.append(own)
        took = time.perf_counter() - start
        print(
            f"{name} seed {seed}: {batched:.1f}, {alone:.1f}, ours {own:.1f} ({took:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
    return line


def ours(name: str, config: Any, features: Features, stream: TaskStream) -> float:
    method = find_method(name)(config, features.clip, Trainer(), stream.dataset.templates)
    for task in stream.tasks():
        method.learn(task)

    def score(part: Part) -> torch.Tensor:
        return method.logits(part)  # type: ignore[arg-type]

    return accuracy(features, score, 256)


def first_tests(data: Dataset, per_class: int) -> Dataset:
    """The dataset with the first `per_class` test pictures of each class."""
    from dataclasses import replace

    labels = data.test.labels.numpy()
    rows = np.concatenate([np.flatnonzero(labels == label)[:per_class] for label in range(len(data.classes))])
    return replace(data, test=data.test.subset(torch.from_numpy(np.sort(rows))))


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m reproduce.fidelity --data-root DIR`: whole runs of four baselines, ours beside the published loops.

CIFAR-100, 50 training pictures per class, 4 tasks, order of seed 1993. A published loop is scored twice: as its code
scores, in batches of test pictures of one class or task, and one picture at a time, as every method here does. The
loops are written from the facts that `tests/methods` lists; nothing of the published code is copied. They keep what we
left out on purpose, such as attention across the test batch, so that its price shows.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from clipcil.clip import load_clip
from clipcil.data.dataset import open_dataset
from clipcil.data.reader import Reader
from clipcil.data.tasks import TaskStream, class_order, task_sizes
from clipcil.experiment.spec import RunSpec, method_settings
from clipcil.methods.registry import find_method
from clipcil.storage import cache_folder
from clipcil.training.trainer import Trainer
from reproduce.claims import markdown_table
from reproduce.fidelity import clap4clip, engine, proof, rapf
from reproduce.fidelity.stream import Features, accuracy

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
    rows = [torch.nonzero(data.test.labels == label).flatten()[: given.test_per_class] for label in range(100)]
    data = replace(data, test=data.test.subset(torch.cat(rows).sort().values))
    sizes = task_sizes(len(data.classes), given.tasks)
    stream = TaskStream(data, Reader(clip, cache_folder(), shared=True), class_order("seed:1993", data.classes), sizes)
    features = Features.read(clip, stream, data.templates)
    lines = [compare(name, given.seeds, features, stream, given.backbone) for name in given.only.split(",")]
    head = ["method", "published, its batches", "published, one by one", "ours", "difference", f"± {LIMIT}"]
    print(markdown_table(head, lines))
    return int(any(line[-1] == "APART" for line in lines))


def compare(name: str, seeds: list[int], features: Features, stream: TaskStream, backbone: str) -> list[str]:
    """A line of the table: the accuracies of all seeds, and how far the mean of ours is from that of the published."""
    kind, config = find_method(name), method_settings(RunSpec(method=name, data="cifar100", backbone=backbone), {})
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        batched, alone = PUBLISHED[name](features, config)
        torch.manual_seed(seed)
        method = kind(config, features.clip, Trainer(), stream.dataset.templates)
        for task in stream.tasks():
            method.learn(task)
        found.append((batched, alone, accuracy(features, method.logits, 256)))
        print(name, "seed", seed, *(f"{value:.1f}" for value in found[-1]), file=sys.stderr, flush=True)
    columns = list(zip(*found, strict=True))
    apart = statistics.mean(columns[2]) - statistics.mean(columns[1])
    cells = [" / ".join(f"{value:.1f}" for value in values) for values in columns]
    return [kind.title, *cells, f"{apart:+.1f}", "within" if abs(apart) <= LIMIT else "APART"]


if __name__ == "__main__":
    raise SystemExit(main())

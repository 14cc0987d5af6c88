"""10,000 classes through DMC-OT's memory and stage 2: `python -m benchmarks.many_classes [--classes 10000]`.

Made-up features (64 dimensions, 10 pictures a class, 100 classes a task), a small text tower, old prompts frozen, the
softmax over the new classes and the nearest old ones above 2,048 classes, at most 16 maps. Printed for the first tasks
and then for every tenth: seconds of the task, bytes of the state, maps kept.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch

from benchmarks.p7_growth import Growth
from benchmarks.shapes import SMALL_TEXT, SMALL_VISION, random_clip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", type=int, default=10_000)
    parser.add_argument("--whole", action="store_true", help="softmax over all classes and all maps, for comparison")
    given = parser.parse_args()
    torch.manual_seed(0)
    growth = Growth(dim=64, classes=100, count=10, clip=random_clip(SMALL_VISION, SMALL_TEXT, 64))
    limits = {"softmax_classes": 0, "max_spaces": 10**6} if given.whole else {"softmax_classes": 2048, "max_spaces": 16}
    growth.method.config = replace(growth.method.config, **limits)
    tasks = given.classes // 100
    for number in range(1, tasks + 1):
        task, start = growth.task(), time.perf_counter()
        growth.method.learn(task)
        seconds = time.perf_counter() - start
        if number in (1, 2, 5) or number % 10 == 0:
            seen, maps = growth.method.seen, len(growth.method.memory.matrices)
            print(
                f"task {number:3d}: {seen:6d} classes, {seconds:6.2f} s, {growth.bytes() / 1e6:7.1f} MB, {maps} maps",
                flush=True,
            )


if __name__ == "__main__":
    main()

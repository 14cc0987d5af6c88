"""P9: stage 1 on two processes of one thread each, against one process with two threads.

Both sides do the same step (loss of Eq. (1), gradients of the whole tower, averaged over the processes), and the
gradients are compared. The share of communication is the time spent in gathering features and averaging gradients.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import normalize

from benchmarks.harness import Row, versus
from benchmarks.shapes import B16_VISION, SMALL_TEXT, SMALL_VISION, random_clip
from clipcil.distributed import average_gradients, gather, rank, share_bounds
from clipcil.training.losses import clip_loss


def step(tower: Any, pixels: torch.Tensor, texts: torch.Tensor, labels: torch.Tensor) -> float:
    """One step; returns the seconds spent communicating."""
    for parameter in tower.parameters():
        parameter.grad = None
    bounds = share_bounds(len(pixels))
    own = tower(pixels[bounds[rank()] : bounds[rank() + 1]], class_only=True).features
    start = time.perf_counter()
    features = gather(own, bounds)
    waited = time.perf_counter() - start
    torch.autograd.backward(clip_loss(100 * normalize(features, dim=-1) @ texts.T, labels))
    start = time.perf_counter()
    average_gradients(list(tower.parameters()))
    return waited + time.perf_counter() - start


def worker(index: int, world: int, threads: int, repeats: int, quick: bool, folder: Path) -> None:
    torch.set_num_threads(threads)
    if world > 1:
        dist.init_process_group("gloo", f"file://{folder / 'rendezvous'}", rank=index, world_size=world)
    torch.manual_seed(0)
    vision = SMALL_VISION if quick else B16_VISION
    tower = random_clip(vision, SMALL_TEXT).vision.requires_grad_(True)
    pixels, labels = torch.randn(16, 3, vision.image_size, vision.image_size), torch.randint(10, (16,))
    texts = normalize(torch.randn(10, 512), dim=-1)
    step(tower, pixels, texts, labels)
    start, waited = time.perf_counter(), 0.0
    for _ in range(repeats):
        waited += step(tower, pixels, texts, labels)
    seconds = (time.perf_counter() - start) / repeats
    first = next(parameter for parameter in tower.parameters() if parameter.grad is not None)
    found = {"seconds": seconds, "waited": waited / repeats, "gradient": first.grad.flatten()[:1000].tolist()}  # type: ignore[union-attr]
    (folder / f"{world}-{index}.json").write_text(json.dumps(found))
    if world > 1:
        dist.destroy_process_group()


def run(quick: bool) -> list[Row]:
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        for world in (1, 2):
            words = [str(world), str(2 // world), "2", str(int(quick)), name]
            here = [sys.executable, "-m", "benchmarks.p9_two_processes"]
            started = [subprocess.Popen([*here, str(index), *words]) for index in range(world)]
            for process in started:
                process.wait()
            found[world] = json.loads((Path(name) / f"{world}-0.json").read_text())
    one, two = (torch.tensor(found[world]["gradient"]) for world in (1, 2))
    share = found[2]["waited"] / found[2]["seconds"]
    return [
        versus(
            "P9",
            "a step of stage 1, B/16-shaped tower, batch 16: one process with two threads, or two with one each",
            {"theirs": found[1]["seconds"], "ours": found[2]["seconds"]},
            error=float((one - two).abs().max() / one.abs().max()),
            tolerance=1e-3,
            note=f"communication (waiting for the other process included) takes {100 * share:.0f} % of a step",
        )
    ]


if __name__ == "__main__":
    index, world, threads, repeats, quick, folder = sys.argv[1:]
    worker(int(index), int(world), int(threads), int(repeats), bool(int(quick)), Path(folder))

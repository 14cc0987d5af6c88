"""S11: training steps of CLAP4CLIP's attention: memory given back to the kernel at every step, or kept for the next.

Each side is a process of its own, because a process cannot take the choice back. They take turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import torch
from torch.nn.functional import normalize

from benchmarks.harness import Row, versus
from clipcil.methods.clap4clip import VisualGuidedAttention
from clipcil.training.cpu import keep_freed_memory


def steps(classes: int, dim: int, count: int) -> dict[str, Any]:
    """Seconds of a step, and the sum of its gradient's squares."""
    torch.manual_seed(0)
    attention = VisualGuidedAttention(dim, 2048, 0.1)
    texts, pictures = normalize(torch.randn(classes, dim), dim=-1), normalize(torch.randn(32, dim), dim=-1)
    blocked = torch.zeros(classes, classes, dtype=torch.bool)
    for step in range(count + 1):
        if step == 1:  # after a first one, to warm up
            start = time.perf_counter()
        found = torch.autograd.grad(
            attention(texts, blocked, pictures).square().sum(), list(attention.parameters()), allow_unused=True
        )
    seconds = (time.perf_counter() - start) / count
    return {"seconds": seconds, "sum": sum(float(part.double().square().sum()) for part in found if part is not None)}


def run(quick: bool) -> list[Row]:
    sizes, turns = (["20", "32", "1"], 1) if quick else (["200", "384", "5"], 3)
    seconds: dict[str, float] = {}
    sums = set()
    for side in ("theirs", "ours") * turns:
        words = [sys.executable, "-m", "benchmarks.s11_freed_memory", side, str(torch.get_num_threads()), *sizes]
        found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        seconds[side] = min(found["seconds"], seconds.get(side, found["seconds"]))
        sums.add(found["sum"])
    what = f"a step of CLAP4CLIP's attention, {sizes[0]} classes and 32 pictures: memory given back, or kept"
    return [versus("S11", what, seconds, error=float(len(sums) > 1), tolerance=0.0)]


if __name__ == "__main__":
    side, threads, *sizes = sys.argv[1:]
    torch.set_num_threads(int(threads))
    if side == "ours":
        keep_freed_memory()
    print(json.dumps(steps(*map(int, sizes))))

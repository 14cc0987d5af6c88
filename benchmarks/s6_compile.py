"""S6: does `torch.compile` help the vision tower in stage 1? Forward and backward, compiled against plain."""

from __future__ import annotations

import shutil
import time

import torch
import torch._dynamo.utils

from benchmarks.harness import Row, alternate, difference, duration, versus
from benchmarks.p5_arithmetic import Stage1
from benchmarks.shapes import SMALL_TEXT, SMALL_VISION, random_clip
from clipcil.clip import load_clip


def run(quick: bool) -> list[Row]:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return [Row("S6", "torch.compile", "no C++ compiler", "", "skipped")]
    clip = random_clip(SMALL_VISION, SMALL_TEXT) if quick else load_clip("mini")
    plain, compiled = Stage1(clip, 32), Stage1(clip, 32)
    tower = compiled.tower
    start = time.perf_counter()
    compiled.tower = torch.compile(tower)  # type: ignore[assignment]
    compiled()
    first = time.perf_counter() - start
    weight = tower.vision_model.embeddings.patch_embedding.weight
    gradients = []
    for step in (compiled, plain):
        step()
        gradients.append(torch.zeros_like(weight) if weight.grad is None else weight.grad.clone())
    error = difference(*gradients)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    seconds = alternate({"theirs": plain, "ours": compiled}, 3 if quick else 40)
    what = "stage 1, embedded tower, batch 32: plain against compiled"
    note = f"the first pass compiles {graphs} graph(s) in {duration(first)}; no option unless it helps"
    return [versus("S6", what, seconds, error=error, tolerance=1e-4, note=note)]

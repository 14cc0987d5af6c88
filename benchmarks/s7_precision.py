"""S7: stage 1 in bfloat16 through Fabric against float32. Statistics and the map stay in float64 (a test says so)."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.harness import Row, alternate, difference, versus
from benchmarks.p5_arithmetic import Stage1
from clipcil.clip import load_clip
from clipcil.training.device import make_fabric


def run(quick: bool) -> list[Row]:
    fabric: Any = make_fabric("cpu", "bf16-mixed")
    step = Stage1(load_clip("mini"), 4 if quick else 32)

    def mixed() -> torch.Tensor:
        with fabric.autocast():
            return step()

    error = difference(mixed(), step())
    seconds = alternate({"theirs": step, "ours": mixed}, 1 if quick else 3, warm_up=False)
    note = "no goal: a processor without bfloat16 arithmetic emulates it; the option is for those that have it"
    what = "stage 1, embedded tower, batch 32: float32 against bf16-mixed"
    return [versus("S7", what, seconds, error=error, tolerance=2e-2, note=note)]

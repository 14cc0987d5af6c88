"""P6: `clipcil run` without any argument: where the seconds go.

A fresh process with an empty cache, so that decoding and the trunk are in it. Clocks are put around the trunk's, the
vision tower's and the text tower's forward pass, and around backward: all but a thousandth of what backward does lies
in the tower that trains (the rest is one score matrix), so its seconds count for the towers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import wraps
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, duration, stopwatch


def run(quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        surroundings = os.environ | {"CLIPCIL_CACHE": str(Path(folder) / "cache")}
        command = [sys.executable, "-m", "benchmarks.p6_default_run", folder, "2" if quick else ""]
        start = time.perf_counter()
        subprocess.run(command, check=True, env=surroundings, stdout=subprocess.DEVNULL)
        total = time.perf_counter() - start
        inside = json.loads((Path(folder) / "inside.json").read_text())
        timing = json.loads((Path(folder) / "run" / "timing.json").read_text())
    share = sum(inside.values()) / total
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in inside.items())
    phases = ", ".join(f"{name} {duration(seconds)}" for name, seconds in timing["seconds"].items())
    details = {"total": total, "inside": inside, **timing}
    return [
        Row("P6", "default run: seconds in trunk and towers", "", duration(sum(inside.values())),
            f"{100 * share:.0f} %", "≥70 %", share >= 0.7, note=f"{parts}; by phase: {phases}", details=details),
        Row("P6", "default run from start to end", "", duration(total), duration(total), "<180 s", total < 180),
    ]  # fmt: skip


def clock(owner: Any, method: str, into: dict[str, float], name: str) -> None:
    """Count the seconds spent in `owner.method`."""
    plain = getattr(owner, method)

    @wraps(plain)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with stopwatch(into, name):
            return plain(*args, **kwargs)

    setattr(owner, method, timed)


def main(folder: Path, tasks: int | None) -> None:
    import torch

    from clipcil.clip.text import TextTower
    from clipcil.clip.trunk import Trunk
    from clipcil.clip.vision import VisionTower
    from clipcil.experiment.experiment import Experiment
    from clipcil.experiment.spec import RunSpec, method_settings

    inside: dict[str, float] = {}
    clock(Trunk, "forward", inside, "trunk")
    clock(VisionTower, "forward", inside, "vision tower")
    clock(TextTower, "forward", inside, "text tower")
    clock(torch.Tensor, "backward", inside, "backward of the towers")
    spec = RunSpec(tasks=tasks)
    settings = {"stage1": {"epochs": 1}, "stage2": {"epochs": 1, "steps": 0}} if tasks else {}
    Experiment.of(spec, method_settings(spec, settings)).run(folder / "run")
    (folder / "inside.json").write_text(json.dumps(inside))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2] else None)

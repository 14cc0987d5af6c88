"""S9: a sweep of β: stage 1 of DMC-OT trained for every value, or once for all."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.harness import Row, versus
from clipcil.clip import load_clip
from clipcil.experiment.experiment import Experiment, LoadCache
from clipcil.tensor_store import TensorStore

VALUES = (0.0, 0.05, 0.1, 0.5, 1.5)


def sweep(folder: Path, shared: LoadCache, quick: bool) -> tuple[float, list[bytes]]:
    """Seconds of the sweep, and the results of each run."""
    found = []
    start = time.perf_counter()
    for value in VALUES[: 2 if quick else None]:
        out = folder / f"{value:g}"
        options = {"tasks": 50 if quick else 10, "shots": 1 if quick else None}
        if quick:
            options |= {"stage1.epochs": 1, "stage2.epochs": 1, "stage2.steps": 0}
        experiment = Experiment("dmc-ot", shared=shared, beta=value, **options)
        if quick:
            tasks = iter(experiment)
            experiment.learn(next(tasks))
            experiment.learn(next(tasks))
            found.append(repr(experiment.results.matrix.tolist()).encode())
        else:
            experiment.run(out)
            found.append((out / "results.json").read_bytes())
    return time.perf_counter() - start, found


def run(quick: bool) -> list[Row]:
    clip = load_clip("mini")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        warm = Experiment("simplecil", cache=LoadCache(backbones={"mini": clip}))  # pictures are preprocessed for both
        warm.learn(next(iter(warm)))
        every, without = sweep(folder / "every", LoadCache(backbones={"mini": clip}), quick)
        kept = TensorStore(folder / "stages")
        once, with_cache = sweep(folder / "once", LoadCache(backbones={"mini": clip}, stages=kept), quick)
    what = f"a sweep of {len(without)} values of β: the tower of stage 1 trained once, not {len(without)} times"
    return [versus("S9", what, {"theirs": every, "ours": once}, error=float(without != with_cache), tolerance=0.0)]

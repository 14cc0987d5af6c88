"""P4: how often a test picture passes the vision tower in a run with a frozen tower. Counted, not timed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import Row
from clipcil.clip import CLIP
from clipcil.experiment.experiment import Experiment, LoadCache
from clipcil.experiment.spec import RunSpec, method_settings


def count_passes(
    spec: RunSpec, folder: Path, settings: Mapping[str, Any] | None = None, clip: CLIP | None = None
) -> tuple[int, int, int, int]:
    """Tower passes of a whole run, training pictures, test pictures, and the test passes of the peers' way."""
    shared = LoadCache({} if clip is None else {spec.backbone: clip})
    results = Experiment.of(spec, method_settings(spec, settings or {}), shared).run(folder / "run")
    ((dataset, _),) = shared.datasets.values()
    if spec.shots is not None:
        dataset = dataset.shrink(spec.shots, spec.seed)
    per_task = [sum(record.total) for record in results.records]  # every test picture seen so far, after every task
    encoded = shared.readers[spec.backbone].passed
    return encoded, len(dataset.train), len(dataset.test), sum(per_task)


def run(quick: bool) -> list[Row]:
    rows = []
    for method in ("simplecil",) if quick else ("simplecil", "rapf"):
        with tempfile.TemporaryDirectory() as folder:
            spec = RunSpec(method=method, tasks=10)
            settings = {"adapter": {"epochs": 1}} if method == "rapf" else {}  # more would change nothing
            encoded, train, test, theirs = count_passes(spec, Path(folder), settings)
        ours = encoded - train
        rows.append(
            Row(
                "P4",
                f"test pictures through the tower, {method}, 10 tasks",
                f"{theirs} passes",
                f"{ours} passes",
                f"{ours / test:.2f} a picture",
                "1",
                ours == test,
                details={"encoded": encoded, "train": train, "test": test, "peers": theirs},
            )
        )
    return rows

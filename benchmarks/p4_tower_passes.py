"""P4: how often a test picture passes the vision tower in a run with a frozen tower. Counted, not timed."""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Row
from clipcil.experiment.experiment import Experiment, LoadCache
from clipcil.experiment.spec import RunSpec, method_settings


def run(quick: bool) -> list[Row]:
    rows = []
    for method in ("simplecil",) if quick else ("simplecil", "rapf"):
        settings: dict[str, Any] = {"adapter": {"epochs": 1}} if method == "rapf" else {}  # more would change nothing
        spec, shared = RunSpec(method=method, tasks=10), LoadCache()
        with tempfile.TemporaryDirectory() as folder:
            results = Experiment.of(spec, method_settings(spec, settings), shared).run(Path(folder) / "run")
        ((data, _),) = shared.datasets.values()
        theirs = sum(sum(record.total) for record in results.records)  # every one so far, after every task
        encoded, train, test = shared.readers[spec.backbone].passed, len(data.train), len(data.test)
        ours = encoded - train
        step, each = f"test pictures through the tower, {method}, 10 tasks", f"{ours / test:.2f} a picture"
        details = {"encoded": encoded, "train": train, "test": test, "peers": theirs}
        passes = f"{theirs} passes", f"{ours} passes"
        rows.append(Row("P4", step, *passes, each, "1", ours == test, details=details))
    return rows

"""P4: runs with a frozen tower: how often a test picture passes it (counted), and how much faster a second run is."""

import os
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.harness import Row
from clipcil.experiment.experiment import Experiment, LoadCache
from clipcil.experiment.spec import RunSpec, method_settings


def run(quick: bool) -> list[Row]:
    rows = []
    for method in ("simplecil",) if quick else ("simplecil", "rapf"):
        settings: dict[str, Any] = {"adapter": {"epochs": 1}} if method == "rapf" else {}  # more would change nothing
        spec, seconds, encoded = RunSpec(method=method, tasks=10), [], []
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, CLIPCIL_CACHE=folder):
            for name in ("first", "second"):
                shared, start = LoadCache(), time.process_time()
                results = Experiment.of(spec, method_settings(spec, settings), shared).run(Path(folder) / name)
                seconds.append(time.process_time() - start)
                encoded.append(shared.readers[spec.backbone].passed)
        ((data, _),) = shared.datasets.values()
        theirs = sum(sum(record.total) for record in results.records)  # every one so far, after every task
        train, test = len(data.train), len(data.test)
        ours = encoded[0] - train
        step, each = f"test pictures through the tower, {method}, 10 tasks", f"{ours / test:.2f} a picture"
        details = {"encoded": encoded, "train": train, "test": test, "peers": theirs, "seconds": seconds}
        passes = f"{theirs} passes", f"{ours} passes"
        rows.append(Row("P4", step, *passes, each, "1", ours == test, details=details))
        cells = f"first {seconds[0]:.3g} s", f"second {seconds[1]:.3g} s", f"{seconds[0] / seconds[1]:.1f}×"
        met = seconds[0] >= 4 * seconds[1] and encoded[1] == 0
        rows.append(Row("P4", f"CPU seconds of a run and of the same again, {method}", *cells, "≥4×", met))
    return rows

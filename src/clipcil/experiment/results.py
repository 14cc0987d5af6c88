"""The folder of a run: what was asked, what came out, what it took.

`config.toml`, `results.json`, `matrix.csv`, `predictions.csv` and `steps.jsonl` are the same bytes for the same seed on
a CPU; what differs from run to run (seconds, versions) stands in `timing.json` and `environment.json`.
"""

from __future__ import annotations

import csv
import io
import math
import os
import platform
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from clipcil.errors import UserError
from clipcil.experiment.checkpoint import RUN_FILES, first_difference
from clipcil.experiment.evaluate import Record
from clipcil.files import LOCK, part_names, write_json, write_text, write_toml
from clipcil.reading import read_toml
from clipcil.report.metrics import Metrics, compute_metrics

if TYPE_CHECKING:
    from clipcil.clip import CLIP
    from clipcil.data.stream import TaskStream
    from clipcil.experiment.monitor import RunMonitor
    from clipcil.experiment.spec import RunSpec


@dataclass
class Outcome:
    """A finished run."""

    config: dict[str, Any]
    names: list[str]
    sizes: list[int]
    records: list[Record]
    drift: list[dict[str, float] | None]
    notes: list[str]

    @cached_property
    def metrics(self) -> Metrics:
        return compute_metrics(self.sizes, [record.correct for record in self.records], self.records[-1].total)

    def as_dict(self) -> dict[str, Any]:
        """The contents of `results.json`."""
        metrics = self.metrics
        keys = ("last", "average", "last_weighted", "average_weighted", "forgetting", "backward_transfer")
        return {
            **{key: round(getattr(metrics, key), 4) for key in keys},
            "after": [round(value, 4) for value in metrics.after],
            "after_weighted": [None if math.isnan(value) else round(value, 4) for value in metrics.after_weighted],
            "matrix": [[None if math.isnan(v) else round(v, 4) for v in row] for row in metrics.matrix.tolist()],
            "per_class": {
                name: None if math.isnan(value) else round(value, 4)
                for name, value in zip(self.names, metrics.per_class, strict=True)
            },
            "sizes": self.sizes,
            "drift": self.drift,
            "between_tasks": self.records[-1].between_tasks,
            "notes": self.notes,
            "config": self.config,
        }


def check_start(out: Path, table: dict[str, Any], resume: bool) -> None:
    """Refuse a folder that holds another run, before anything is loaded or written."""
    path = out / "config.toml"
    if not path.exists():
        left = {LOCK, "error.txt", *part_names(out, RUN_FILES.__contains__)}  # by a run killed while it began
        if out.is_dir() and any(entry.name not in left for entry in out.iterdir()):
            raise UserError(f"{out} is not empty and holds no run; give --out a new folder")
        return
    if difference := first_difference(read_toml(path), table):
        raise UserError(f"{out} holds another run ({difference}); give --out another folder")
    if not resume:
        raise UserError(f"{out} holds this very run already; go on with --resume {out}, or give --out another folder")


def write_start(out: Path, table: dict[str, Any]) -> None:
    """Claim the folder for this run."""
    if not (out / "config.toml").exists():
        write_toml(out / "config.toml", table)
    write_json(out / "environment.json", environment())


def identity(spec: RunSpec, table: dict[str, Any], clip: CLIP, stream: TaskStream) -> dict[str, Any]:
    """What a checkpoint belongs to: every choice, and the very weights, pictures and class order they led to."""
    data = stream.dataset
    return {
        "method": spec.method,
        "backbone": clip.fingerprint,
        "preprocessing": clip.preprocess.fingerprint,
        "dataset": {"name": spec.data, "train": data.train.key, "test": data.test.key},
        "classes": stream.names,
        "sizes": stream.sizes,
        "config": table,
    }


def write_outcome(out: Path, outcome: Outcome, stream: TaskStream, monitor: RunMonitor) -> None:
    write_text(out / "matrix.csv", _matrix(outcome))
    write_text(out / "predictions.csv", _predictions(outcome, stream))
    seconds = {name: round(value, 3) for name, value in monitor.seconds.items()}
    write_json(out / "timing.json", {"seconds": seconds, "peak_megabytes": monitor.peak_megabytes})
    write_json(out / "results.json", outcome.as_dict())  # last: its presence says that the run is whole


def environment() -> dict[str, Any]:
    """Versions and machine, for whoever wonders later why a number differs."""
    packages = ("clipcil", "torch", "lightning-fabric", "numpy", "tokenizers", "pillow", "safetensors")
    versions = {name: metadata.version(name) for name in packages}
    machine = {"machine": platform.machine(), "system": platform.system(), "cores": os.cpu_count()}
    return {"python": platform.python_version(), **versions, **machine, "threads": torch.get_num_threads()}


def _matrix(outcome: Outcome) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    count = len(outcome.records)
    writer.writerow(["after", *(f"task {i + 1}" for i in range(count)), "A_k"])
    for k, row in enumerate(outcome.metrics.matrix.tolist()):
        cells = ["" if math.isnan(value) else f"{value:.4f}" for value in row]
        writer.writerow([f"task {k + 1}", *cells, f"{outcome.metrics.after[k]:.4f}"])
    return text.getvalue()


def _predictions(outcome: Outcome, stream: TaskStream) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["task", "row", "picture", "class", "predicted"])
    for task, guesses in enumerate(outcome.records[-1].predictions):
        pictures = stream.test_set(task)
        for index, guess in enumerate(guesses):
            true = outcome.names[int(pictures.labels[index])]
            where = (task + 1, int(pictures.rows[index]), pictures.describe(index))
            writer.writerow([*where, true, outcome.names[guess]])
    return text.getvalue()

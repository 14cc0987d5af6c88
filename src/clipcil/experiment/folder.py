"""The folder of a run: its lock, checkpoints and results.

`config.toml`, `results.json`, `matrix.csv`, `predictions.csv` and `steps.jsonl` have the same bytes for the same seed
on a CPU; what differs from run to run (seconds, versions) is in `timing.json` and `environment.json`.
"""

import datetime
import hashlib
import itertools
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipcil import __version__
from clipcil.data.dataset import datasets, resolve_options
from clipcil.data.names import ANYTHING
from clipcil.errors import UserError, quoted
from clipcil.experiment.evaluate import Record
from clipcil.experiment.experiment import Experiment
from clipcil.experiment.monitor import Display, StepLog, peak_megabytes
from clipcil.experiment.spec import RunSpec, as_table, check_same, first_difference
from clipcil.methods.base import method_state, restore_method
from clipcil.report.runs import RunRecord, read_run
from clipcil.settings import Count, typed
from clipcil.storage import claim, digest, read_json, read_toml, run_lock, write_json, write_text, write_toml
from clipcil.tensor_store import TensorStore, read_entry
from clipcil.training.device import usual_torch
from clipcil.training.own_random import random_state, set_random_state

ERROR = "error.txt"
"""The traceback of a run of a grid that failed."""
CHECKPOINTS_KEPT = 2
"""Checkpoints kept: the newest, and the one before it in case the newest is damaged."""
RUN_FILES = ("matrix.csv", "predictions.csv", "steps.jsonl")
"""Files that a finished run has beside `results.json`."""
PACKAGES = ("torch", "lightning-fabric", "numpy", "tokenizers", "pillow", "safetensors")
"""Packages whose versions `environment.json` names."""


@dataclass
class Progress:
    """The facts of a checkpoint."""

    records: list[Record]
    drift: list[dict[str, float] | None]
    log_size: Count
    seconds: dict[str, float]
    names: list[str]
    sizes: list[Count]
    tasks: Count
    belongs: dict[str, Any]
    """The identity of the run."""


Checkpoint = tuple[dict[str, Tensor], Progress]


@dataclass
class Environment:
    """The entries of `environment.json` that are read again."""

    threads: int | None = None
    inputs: dict[str, str] | None = None
    """Digests of the files that the results were made from, as `inputs` returned them."""


class RunFolder:
    """The files of one run; `open_run` opens it."""

    def __init__(self, folder: Path, display: Display) -> None:
        self.folder, self.display = folder, display
        self.log = StepLog(folder / "steps.jsonl", display.tell)
        self.checkpoints = TensorStore(folder / "checkpoint")
        self.stages = TensorStore(folder / "checkpoint" / "stages")
        self._identity: dict[str, Any] = {}
        self._inputs: dict[str, str] = {}
        self._environment: dict[str, Any] = {}

    def begin(self, experiment: Experiment) -> Checkpoint | None:
        """Load the experiment, write how the run begins, and return its newest checkpoint."""
        self._identity = json.loads(json.dumps(identity(experiment)))
        text = json.dumps(self._identity, sort_keys=True)
        experiment.mark = hashlib.sha256(text.encode()).hexdigest()[:24]
        if (checkpoint := self._newest()) is not None:
            self.log.size, self.log.task = checkpoint[1].log_size, checkpoint[1].tasks
        self._inputs = inputs(experiment.spec, experiment.config)
        self._write_start(experiment)  # only now: a run that could not begin has claimed nothing
        for note in experiment.notes:
            self.display.tell(note)
        return checkpoint

    def _keys(self) -> list[str]:
        """The keys of the checkpoints, the oldest first; other files in their folder are left alone."""
        return [key for key in self.checkpoints.all_keys() if key.startswith("task-") and key[5:].isdecimal()]

    def _newest(self) -> Checkpoint | None:
        """The newest whole checkpoint; a damaged one is named, and the one before it is used."""
        for key in reversed(self._keys()):
            for path in self.checkpoints.paths(key):
                try:
                    tensors, facts = read_entry(path)
                except UserError as error:
                    self.display.tell(f"{error}; going back to the checkpoint before it")
                    continue
                progress: Progress = typed(facts, Progress, "checkpoint")
                if difference := first_difference(progress.belongs, self._identity):
                    raise UserError(
                        f"{path} belongs to another run ({difference}); put the right file back or start a new run"
                    )
                tasks = progress.tasks
                if not int(key.removeprefix("task-")) == tasks == len(progress.records) == len(progress.drift):
                    raise UserError(f"{path} is not the checkpoint after task {tasks}; start a new run")
                return tensors, progress
        return None

    def _write_start(self, experiment: Experiment) -> None:
        """Claim the folder for this run."""
        if not (self.folder / "config.toml").exists():
            write_toml(self.folder / "config.toml", experiment.table)
        clip, before, threads = experiment.method.clip, read_environment(self.folder), torch.get_num_threads()
        self._environment = {
            "clipcil": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in PACKAGES},
            "machine": platform.machine(),
            "system": platform.system(),
            "cores": os.cpu_count(),
            "threads": threads,
            "backbone": clip.pinned,
            "fingerprint": clip.fingerprint,
            "inputs": before.inputs,  # those of the results that are there, until this run has ended
        }
        write_json(self.folder / "environment.json", self._environment)
        if before.threads not in (None, threads):
            self.display.tell(
                f"begun with {before.threads} threads, continued with {threads}: losses and drift can differ in their"
                f" last digits; OMP_NUM_THREADS={before.threads} gives the same bytes"
            )

    def save(self, experiment: Experiment) -> None:
        """Write a checkpoint after the newest task; the stages of the task are not needed any more."""
        tasks = len(experiment.records)
        tensors, shape = method_state(experiment.method)
        with experiment.random.active():
            tensors = {f"method.{key}": value for key, value in tensors.items()} | random_state()
        self.log.write()
        self.log.task = tasks
        measured = (experiment.records, experiment.drift, self.log.size, experiment.timer.seconds)
        progress = Progress(*measured, **shape, tasks=tasks, belongs=self._identity)
        self.checkpoints.save(f"task-{tasks:04d}", tensors, asdict(progress))
        for key in self._keys():
            if not tasks - CHECKPOINTS_KEPT < int(key.removeprefix("task-")) <= tasks:
                self.checkpoints.drop(key)
        for key in self.stages.all_keys():
            self.stages.drop(key)

    def finish(self, experiment: Experiment) -> None:
        """Write the results of a run that has ended."""
        results = experiment.results
        self.log.write()
        write_text(self.folder / "matrix.csv", results.matrix_csv())
        write_text(self.folder / "predictions.csv", results.predictions_csv(experiment.stream))
        seconds = {name: round(value, 3) for name, value in experiment.timer.seconds.items()}
        timing = {"seconds": seconds, "peak_megabytes": peak_megabytes()}
        write_json(self.folder / "timing.json", {**timing, "finished": datetime.date.today().isoformat()})
        write_json(self.folder / "results.json", results.as_dict())  # its presence says that the run is complete
        write_json(self.folder / "environment.json", {**self._environment, "inputs": self._inputs})


@contextmanager
def open_run(folder: Path, table: dict[str, Any], display: Display, resume: bool) -> Iterator[RunFolder]:
    """The folder of the run with the options and settings `table`, locked inside the block.

    A folder that holds something else is refused, and one that holds this run where it may not be resumed.
    """
    with run_lock(folder):
        claim(folder, "config.toml", "run", ignore=(ERROR,))
        if (folder / "config.toml").exists():
            check_same(folder, read_toml(folder / "config.toml"), table)
            if not resume:
                raise UserError(
                    f"{folder} holds this run already; continue it with --resume {quoted(folder)} (in Python with"
                    " run(folder)), or name another"
                )
        yield RunFolder(folder, display)


def restore(experiment: Experiment, tensors: dict[str, Tensor], progress: Progress) -> None:
    """Put an experiment that has learnt nothing into the state of a checkpoint."""
    own = {key.removeprefix("method."): value for key, value in tensors.items() if key.startswith("method.")}
    with usual_torch(experiment.method.device), experiment.random.active():
        restore_method(experiment.method, own, vars(progress))
        try:
            set_random_state(tensors)
        except (RuntimeError, LookupError, TypeError) as error:
            raise UserError(f"the checkpoint of task {progress.tasks} has no random state; start a new run") from error
    experiment.records, experiment.drift, experiment.timer.seconds = progress.records, progress.drift, progress.seconds


def identity(experiment: Experiment) -> dict[str, Any]:
    """Everything that decides the results: every choice, and the weights, pictures and class order they led to."""
    clip, data, kind = experiment.method.clip, experiment.stream.dataset, type(experiment.method)
    return {
        "method": f"{kind.__module__}.{kind.__qualname__}",
        "backbone": clip.fingerprint,
        "preprocessing": clip.preprocess.fingerprint,
        "tokenizer": clip.tokenizer.fingerprint,
        "dataset": {"name": experiment.spec.data, "train": data.train.key, "test": data.test.key},
        "labels": [hashlib.sha256(part.labels.numpy().tobytes()).hexdigest() for part in (data.train, data.test)],
        "templates": list(data.templates),
        "files": {key: digest(path) for key, path in _paths(experiment.config).items()},
        "classes": experiment.stream.names,
        "sizes": experiment.stream.sizes,
        "config": experiment.table,
    }


def finished_run(folder: Path, spec: RunSpec, config: Any) -> RunRecord | None:
    """The results in `folder`; None where they are incomplete or not of these options, settings and input files."""
    if not all((folder / name).is_file() for name in RUN_FILES):
        return None
    try:
        found = read_run(folder)
    except UserError:  # damaged results are made again from the last checkpoint
        return None
    if json.dumps(found.config, sort_keys=True) != json.dumps(as_table(spec, config), sort_keys=True):
        return None
    before = read_environment(folder).inputs or {}
    changed = any(before.get(key, digest) != digest for key, digest in inputs(spec, config).items())
    return None if changed else found


def read_environment(folder: Path) -> Environment:
    """The entries of `environment.json` that are read again; none where the file is missing or damaged."""
    with suppress(UserError):
        found: Environment = typed(read_json(folder / "environment.json"), Environment)
        return found
    return Environment()


def inputs(spec: RunSpec, config: Any) -> dict[str, str]:
    """A digest of every file and folder that the options and settings name and that is there: an order, descriptions,
    lists of a split, weights with the files beside them, pictures of one's own. A dataset that is the same everywhere
    is not digested: its folder may hold a million files."""
    named = _paths(config)
    if spec.data in datasets():
        options = _paths(resolve_options(spec.data, spec.data_options))
        named |= {f"data_options.{key}": path for key, path in options.items()}
    if (order := Path(spec.order)).is_file():
        named["order"] = order
    if spec.backbone != "mini":
        named["backbone"] = backbone = Path(spec.backbone)
        if backbone.is_file():  # its config and its tokenizer
            beside = [path for pattern in ("*.json", "*.txt") for path in backbone.parent.glob(pattern)]
            named |= {f"backbone/{path.name}": path for path in beside}
    if spec.data in ANYTHING and spec.data_root:
        named["data_root"] = spec.data_root
    return {key: found for key, path in named.items() if (found := digest(path))}


def _paths(options: Any) -> dict[str, Path]:
    """The options or settings that are paths."""
    return {key: value for key, value in vars(options).items() if isinstance(value, Path)}


def fresh_folder(what: str) -> Path:
    """`runs/2026-01-31-what`, followed by a number where that exists."""
    stem = f"{datetime.date.today().isoformat()}-{what}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(folder for name in names if not (folder := Path("runs") / name).exists())

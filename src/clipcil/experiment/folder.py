"""The folder of a run: its lock, checkpoints and results.

`config.toml`, `results.json`, `matrix.csv`, `predictions.csv` and `steps.jsonl` have the same bytes for the same seed
on a CPU; what differs from run to run (seconds, versions) is in `timing.json` and `environment.json`.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from clipcil.data.dataset import datasets
from clipcil.errors import UserError, printable, quoted
from clipcil.experiment.evaluate import Record
from clipcil.experiment.finished import environment, inputs, write_inputs
from clipcil.experiment.monitor import Display, StepLog, peak_megabytes
from clipcil.experiment.spec import PROCESSES, RunSpec, as_table, method_settings, resolved
from clipcil.methods.base import method_state, restore_method
from clipcil.methods.registry import methods
from clipcil.settings import Count, build, merge, to_dict, typed
from clipcil.storage import claim, read_json, read_toml, run_lock, sha256, sweep, write_json, write_text, write_toml
from clipcil.tensor_store import TensorStore, read_entry
from clipcil.training.device import usual_torch
from clipcil.training.own_random import random_state, set_random_state

if TYPE_CHECKING:
    from clipcil.experiment.experiment import Experiment

ERROR = "error.txt"
"""The traceback of a run of a grid that failed."""
KEEP = 2
"""Checkpoints kept: the newest, and the one before it in case the newest is damaged."""


@dataclass
class Checkpoint:
    """A run after some of its tasks."""

    tasks: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


@dataclass
class Progress:
    """The facts of a checkpoint beside the method."""

    records: list[Record]
    drift: list[dict[str, float] | None]
    log_size: Count
    seconds: dict[str, float]


class RunFolder:
    """The folder of one run; used as a context, it holds the lock inside.

    Args:
        folder: The folder.
        table: Every option and setting, as `config.toml` holds them.
        display: Told about damaged files and about where the run continues.
        resume: Whether a run in the folder may be continued.

    Raises:
        UserError: On entering: another process writes to the folder, or it holds something else.
    """

    def __init__(self, folder: Path, table: dict[str, Any], display: Display, resume: bool) -> None:
        self.folder, self.table, self.display, self.resume = folder, table, display, resume
        self.log = StepLog(folder / "steps.jsonl", display.tell)
        self._inputs: dict[str, str] = {}
        self._identity: dict[str, Any] = {}

    def __enter__(self) -> RunFolder:
        with ExitStack() as stack:
            stack.enter_context(run_lock(self.folder))
            self._check_start()
            self.checkpoints = TensorStore(self.folder / "checkpoint")
            self.stages = TensorStore(self.folder / "checkpoint" / "stages")
            for folder in (self.checkpoints.folder, self.stages.folder):
                sweep(folder)
            self._lock = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    def _check_start(self) -> None:
        """Refuse a folder that holds something else, before anything is loaded or written."""
        claim(self.folder, "config.toml", "run", ignore=(ERROR,))
        if not (self.folder / "config.toml").exists():
            return
        check_same(self.folder, read_toml(self.folder / "config.toml"), self.table)
        if not self.resume:
            raise UserError(
                f"{self.folder} holds this run already; continue it with --resume {quoted(self.folder)} (in Python"
                " with run(folder)), or name another"
            )

    def begin(self, experiment: Experiment) -> Checkpoint | None:
        """Load the experiment, write how the run begins, and return its newest checkpoint."""
        self._identity = json.loads(json.dumps(identity(experiment)))
        text = json.dumps(self._identity, sort_keys=True)
        experiment.mark = hashlib.sha256(text.encode()).hexdigest()[:24]
        if (checkpoint := self._newest()) is not None:
            self.log.size = typed(checkpoint.facts.get("log_size"), Count, "log_size")
            self.log.task = checkpoint.tasks
        self._inputs = inputs(self.table)
        # Only now: a run that could not begin has claimed nothing.
        for note in (*self._write_start(experiment), *experiment.notes):
            self.display.tell(note)
        return checkpoint

    def _newest(self) -> Checkpoint | None:
        """The newest whole checkpoint; a damaged one is named, and the one before it is used."""
        for key in reversed(self.checkpoints.all_keys()):
            for path in self.checkpoints.paths(key):
                try:
                    tensors, facts = read_entry(path)
                except UserError as error:
                    self.display.tell(f"{error}; going back to the checkpoint before it")
                    continue
                found = facts.get("belongs")
                if difference := first_difference(found if isinstance(found, dict) else {}, self._identity):
                    raise UserError(
                        f"{path} belongs to another run ({difference}); put the right file back or start anew"
                    )
                if facts.get("tasks") != int(key.removeprefix("task-")):
                    raise UserError(f"{path} is the checkpoint after task {facts.get('tasks')}; it was renamed")
                return Checkpoint(int(facts["tasks"]), tensors, facts)
        return None

    def _write_start(self, experiment: Experiment) -> list[str]:
        """Claim the folder for this run. Returns notes for the user."""
        if not (self.folder / "config.toml").exists():
            write_toml(self.folder / "config.toml", self.table)
        clip = experiment.method.clip
        now = {**environment(), "backbone": clip.pinned, "fingerprint": clip.fingerprint, "inputs": self._inputs}
        try:
            kept = read_json(self.folder / "environment.json")
            before = kept["threads"]
            now["inputs"] = kept.get("inputs", now["inputs"])  # of the results that are there, until this run has ended
        except (UserError, LookupError, TypeError, AttributeError):
            before = now["threads"]
        write_json(self.folder / "environment.json", now)
        if before == now["threads"]:
            return []
        return [
            f"begun with {printable(before)} threads, continued with {now['threads']}: sums are added in another order,"
            f" so losses and drift can differ in their last digits; OMP_NUM_THREADS={printable(before)} gives the same"
            " bytes"
        ]

    def save(self, experiment: Experiment) -> None:
        """Write a checkpoint after the newest task; the stages of the task are not needed any more."""
        tasks = len(experiment.records)
        tensors, shape = method_state(experiment.method)
        with experiment.random.active():
            tensors = {f"method.{key}": value for key, value in tensors.items()} | random_state()
        self.log.write()
        self.log.task = tasks
        progress = Progress(experiment.records, experiment.drift, self.log.size, experiment.timer.seconds)
        facts = {**asdict(progress), **shape, "tasks": tasks, "belongs": self._identity}
        self.checkpoints.save(f"task-{tasks:04d}", tensors, facts)
        for key in self.checkpoints.all_keys():
            if not tasks - KEEP < int(key.removeprefix("task-")) <= tasks:
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
        write_json(self.folder / "results.json", results.as_dict())  # last: its presence says that the run is complete
        write_inputs(self.folder, self._inputs)


def restore(experiment: Experiment, checkpoint: Checkpoint) -> None:
    """Put an experiment that has learnt nothing into the state of a checkpoint.

    Raises:
        UserError: The checkpoint does not fit.
    """
    own = {key.removeprefix("method."): value for key, value in checkpoint.tensors.items() if key.startswith("method.")}
    with usual_torch(experiment.method.device), experiment.random.active():
        restore_method(experiment.method, own, checkpoint.facts)
        try:
            set_random_state(checkpoint.tensors)
        except (RuntimeError, LookupError, TypeError) as error:
            raise UserError(f"the checkpoint after task {checkpoint.tasks} has no random state; start anew") from error
    progress: Progress = typed(checkpoint.facts, Progress, "checkpoint")
    if not len(progress.records) == len(progress.drift) == checkpoint.tasks:
        raise UserError(f"the checkpoint after task {checkpoint.tasks} has {len(progress.records)} records; start anew")
    experiment.records, experiment.drift = progress.records, progress.drift
    experiment.timer.seconds = progress.seconds


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
        "files": {key: sha256(path) for key, path in vars(experiment.config).items() if isinstance(path, Path)},
        "classes": experiment.stream.names,
        "sizes": experiment.stream.sizes,
        "config": experiment.table,
    }


def check_installed(folder: Path, run: dict[str, Any]) -> None:
    """Refuse to continue a run of a dataset or method that nobody here knows by its name."""
    for key, called, known in (("data", "dataset", datasets()), ("method", "method", methods())):
        if isinstance(name := run.get(key), str) and name not in known:
            raise UserError(
                f"{folder} is a run of the {called} '{name}', which is not installed here; where it was given in"
                " Python, make the same Experiment again and call run(folder), which continues"
            )


def check_same(folder: Path, found: dict[str, Any], asked: dict[str, Any]) -> None:
    """Refuse to continue a run with other options than it was begun with."""
    if difference := first_difference(found, asked):
        raise UserError(f"{folder} holds another run ({difference}); name another folder with --out")


def first_difference(found: dict[str, Any], asked: dict[str, Any], where: str = "") -> str:
    """The first entry in which two tables differ, as a phrase for a message; empty where they agree."""
    for key in sorted({*found, *asked}, key=lambda key: (key != "run", key)):  # the method's name before its settings
        a, b = found.get(key), asked.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            if inner := first_difference(a, b, f"{where}{key}."):
                return inner
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b) > 3 and a != b:
            place = next(i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1])
            return f"its {where}{key}[{place}] is {_show(a[place])}, not {_show(b[place])}"
        elif json.dumps(a) != json.dumps(b):
            return f"its {where}{key} is {_show(a)}, not {_show(b)}"
    return ""


def _show(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def read_config(folder: Path) -> dict[str, Any]:
    """The tables `run` and `method` of the run in `folder`."""
    path = folder / "config.toml"
    if not path.is_file():
        raise UserError(f"{folder} holds no run (there is no config.toml in it)")
    table = read_toml(path)
    for part in ("run", "method"):
        if not isinstance(table.get(part), dict):
            raise UserError(f"{path} is damaged: it has no table [{part}]; put the right one back or start anew")
    return table


def options_of_run(folder: Path, given: Mapping[str, Any]) -> tuple[RunSpec, Any, Path | None]:
    """The options and settings of the run in `folder`, and where its data is today.

    Args:
        folder: A folder that a run has written to.
        given: As for `Experiment.resume`.

    Raises:
        UserError: The folder holds no run, or something in `given` is not what the run was begun with.
    """
    kept = read_config(folder)
    check_installed(folder, kept["run"])
    options, settings = {key: value for key, value in given.items() if key != "settings"}, given.get("settings", {})
    other = {"tasks": "increment", "increment": "tasks"}  # the one given replaces the other one kept
    run = {key: value for key, value in kept["run"].items() if other.get(key) not in options}
    spec = resolved(build(RunSpec, merge(run, options)))
    data_root = spec.data_root
    spec = replace(spec, data_root=build(RunSpec, run).data_root)  # the pictures are compared, not where they are
    compared = options.keys() - {*PROCESSES, "data_root"}
    before, now = ({key: table.get(key) for key in compared} for table in (kept["run"], to_dict(spec)))
    check_same(folder, {"run": before}, {"run": now})  # first: the settings of another method do not fit
    config = method_settings(spec, merge(kept["method"], settings), preset=False)
    check_same(folder, kept, as_table(spec, config))
    return spec, config, data_root


def fresh_folder(what: str) -> Path:
    """`runs/2026-01-31-what`, followed by a number where that exists."""
    stem = f"{datetime.date.today().isoformat()}-{what}"
    for number in range(1, 10_000):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        if not folder.exists():
            return folder
    raise UserError("runs/ holds ten thousand runs of today; name a folder with --out")

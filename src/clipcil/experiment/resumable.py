"""Running an experiment into a folder: stopped at any moment, it continues from its last checkpoint.

The folder itself, and what is read and written in it, is in `folder.py`; the files of a checkpoint in `checkpoint.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipcil.distributed import barrier, from_first, name_lost_processes, rank
from clipcil.errors import UserError
from clipcil.experiment.checkpoint import CheckpointFolder, Loaded, SnapshotFolder, run_mark, sweep_run
from clipcil.experiment.device import usual_torch
from clipcil.experiment.display import Display
from clipcil.experiment.evaluate import Record
from clipcil.experiment.folder import (
    check_installed,
    check_same,
    check_start,
    inputs,
    read_config,
    write_inputs,
    write_results,
    write_start,
)
from clipcil.experiment.monitor import RunMonitor
from clipcil.experiment.results import Results
from clipcil.experiment.spec import PROCESSES, RunSpec, as_table, method_settings, resolved
from clipcil.experiment.task_loop import TaskLoop, title_of
from clipcil.files import run_lock, sha256
from clipcil.reading import Count, typed
from clipcil.settings import build, merge, to_dict

HEADER = ("task", "classes", "A_k", "weighted", "newest", "first", "seconds")
Load = Callable[[RunMonitor], TaskLoop]
"""Loads the experiment, with the monitor that is to watch it."""


def run_into(folder: Path, table: dict[str, Any], load: Load, display: Display, resume: bool) -> Results:
    """Learn and evaluate every task, in every process of the run; see `Experiment.run`.

    Args:
        folder: Folder of the run.
        table: Every option and setting, as `config.toml` holds them.
        load: Called once the folder is known to be that of this run, or a new one.
        display: What shows the progress.
        resume: Whether a run in `folder` may be continued.
    """
    if rank() > 0:
        return _follow(load)
    with run_lock(folder), name_lost_processes(folder):
        return _lead(folder, table, load, display, resume)


def _lead(folder: Path, table: dict[str, Any], load: Load, display: Display, resume: bool) -> Results:
    """The run in its first process, which alone reads and writes the folder."""
    snapshots = SnapshotFolder(folder / "checkpoint", display.tell)
    check_start(folder, table, resume)
    sweep_run(folder)
    loop = load(RunMonitor(folder / "steps.jsonl", display, snapshots))
    belongs = _identity(loop)
    checkpoints, snapshots.mark = CheckpointFolder(folder / "checkpoint", belongs), run_mark(belongs)
    kept = checkpoints.newest(display.tell)
    snapshots.clear(keep=kept.tasks if kept is not None else 0)
    made_from = inputs(table)
    # Only now: a run that could not begin has claimed nothing.
    for note in (*write_start(folder, table, loop.method.clip, made_from), *loop.parts.notes):
        display.tell(note)
    kept = from_first(kept)
    if kept is not None:
        _restore(loop, kept)
        display.tell(f"going on after task {kept.tasks} of {len(loop.stream)}")
    display.start(title_of(loop.spec, type(loop.method), loop.stream), len(loop.stream))
    try:
        for task in loop:
            started = time.perf_counter()
            loop.learn(task)
            results = loop.evaluate()
            with loop.random.active():  # its state is saved, too
                checkpoints.save(task.index + 1, loop.method, _facts(loop))
            snapshots.clear()
            display.row(_row(results, time.perf_counter() - started), HEADER)
        loop.monitor.cut_log()
        write_results(folder, loop.results, loop.stream, loop.monitor)
        write_inputs(folder, made_from)
        barrier()
        return loop.results
    finally:
        display.stop()


def _follow(load: Load) -> Results:
    """The run in the other processes: the same computations, and no file."""
    loop = load(RunMonitor(None, Display(), None))
    nothing: Loaded | None = None
    if (kept := from_first(nothing)) is not None:
        _restore(loop, kept)
    for task in loop:
        loop.learn(task)
        loop.evaluate()
    barrier()
    return loop.results


@dataclass
class _Facts:
    """What a checkpoint holds beside the method."""

    records: list[Record]
    drift: list[dict[str, float] | None]
    log_size: Count
    seconds: dict[str, float]


def _facts(loop: TaskLoop) -> dict[str, Any]:
    return dataclasses.asdict(_Facts(loop.records, loop.drift, loop.monitor.log_size, loop.monitor.seconds))


def _restore(loop: TaskLoop, kept: Loaded) -> None:
    with usual_torch(loop.method.device), loop.random.active():
        CheckpointFolder.restore(kept, loop.method)
    facts: _Facts = typed(kept.facts, _Facts)
    if not len(facts.records) == len(facts.drift) == kept.tasks:
        raise UserError(f"the checkpoint after task {kept.tasks} has {len(facts.records)} records; start anew")
    loop.records, loop.drift = facts.records, facts.drift
    loop.monitor.log_size, loop.monitor.seconds = facts.log_size, facts.seconds


def _identity(loop: TaskLoop) -> dict[str, Any]:
    """What a checkpoint belongs to: every choice, and the very weights, pictures and class order they led to.

    All that decides the results is here: a run that continues from a checkpoint is one of the files of today.
    """
    clip, data, kind = loop.method.clip, loop.stream.dataset, type(loop.method)
    return {
        "method": f"{kind.__module__}.{kind.__qualname__}",
        "backbone": clip.fingerprint,
        "preprocessing": clip.preprocess.fingerprint,
        "tokenizer": clip.tokenizer.fingerprint,
        "dataset": {"name": loop.spec.data, "train": data.train.key, "test": data.test.key},
        "labels": [hashlib.sha256(part.labels.numpy().tobytes()).hexdigest() for part in (data.train, data.test)],
        "templates": list(data.templates),
        "files": {key: sha256(path) for key, path in vars(loop.config).items() if isinstance(path, Path)},
        "classes": loop.stream.names,
        "sizes": loop.stream.sizes,
        "config": as_table(loop.spec, loop.config),
    }


def _row(results: Results, seconds: float) -> list[str]:
    count, metrics = len(results.records), results.metrics
    numbers = (metrics.after[-1], metrics.after_weighted[-1], metrics.matrix[-1, -1], metrics.matrix[-1, 0])
    seen = sum(results.sizes[:count])
    return [f"{count}/{len(results.sizes)}", str(seen), *(f"{number:.2f}" for number in numbers), f"{seconds:.1f}"]


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

"""Run a grid: finished runs are reused, stopped runs are continued, and the others go on when a run fails.

Runs are done in this process, in several processes of this machine, or as tasks of a Ray cluster.
"""

import json
import multiprocessing
import os
import platform
import signal
import threading
import time
import traceback
import uuid
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from clipcil.cluster import connect, need_ray
from clipcil.data.names import ANYTHING
from clipcil.errors import UserError, first_line
from clipcil.experiment.experiment import Experiment, LoadCache
from clipcil.experiment.folder import ERROR, finished_run, inputs
from clipcil.experiment.grid import PlannedRun
from clipcil.experiment.monitor import Display
from clipcil.experiment.spec import TASKS, Grid
from clipcil.report.compare import Group, Line, group_runs
from clipcil.report.runs import NUMBERS, RunRecord, find_runs
from clipcil.settings import typed
from clipcil.signals import STOPS
from clipcil.storage import InUseError, MissingFileError, need_writable, open_log, parse_json, read_bytes, write_text
from clipcil.tensor_store import STAGES_GIB, TensorStore
from clipcil.training.cpu import prepare_process

RESULTS = "results.jsonl"
ATTEMPTS = 3
"""Maximum number of attempts at a run whose process dies, each from its last checkpoint."""
PATIENCE = 120
"""Seconds that a run on Ray waits for an earlier attempt at it to release its folder."""
THREADS = "OMP_NUM_THREADS"
"""Environment variable that torch reads when it is imported."""
ENVIRONMENT = ("CLIPCIL_CACHE", STAGES_GIB, "OMP_WAIT_POLICY", "HF_HOME", "HF_HUB_OFFLINE")
"""Environment variables that a worker of Ray is given as they are here."""


@dataclass(frozen=True)
class RunOutcome:
    """A run of the grid and how it ended."""

    planned: PlannedRun
    result: RunRecord | None
    error: str = ""


def run_grid(
    planned: Sequence[PlannedRun],
    grid: Grid,
    tell: Callable[[str], None] = lambda line: None,
    make_display: Callable[[], Display] = Display,
) -> list[RunOutcome]:
    """Do every run that is not done yet, and return how each of `planned` ended, in the same order.

    A run that was stopped continues from its checkpoint. Each run that ends adds a line to `results.jsonl`, and `tell`
    is called with a line for it. `make_display` makes the display of a run that is done in this process.
    """
    runs, known, log = distinct(planned), FinishedRuns(grid.kept), grid.out / RESULTS
    logged = {line.get("run") for line in read_log(log) if line.get("status") == "done"}
    need_writable(log)
    outcomes: dict[Path, RunOutcome] = {}

    def end(run: PlannedRun, error: str, result: RunRecord | None, state: str = "done") -> None:
        """A run has ended: with an error, or with a result, and then `state` says when."""
        if result is None and not error:
            error = "the run's input files changed after it started, or its results are unreadable; use another --out"
        outcomes[run.folder] = RunOutcome(run, result, error)
        if result is None or run.folder.name not in logged:
            _add_to_log(log, outcomes[run.folder])
        ending = f"FAILED: {error}"
        if result is not None:
            ending = f"A_B {result.last:.2f}, Ā {result.average:.2f}, {result.seconds:.1f} s ({state})"
        tell(f"[{runs.index(run) + 1}/{len(runs)}] {_name(run, runs)}: {ending}")

    done = {run.folder: result for run in runs if (result := known.find(run)) is not None}
    todo = [run for run in runs if run.folder not in done]
    for line in known.on_other_devices(todo):
        tell(f"note: {line}")
    for run in runs:
        if run.folder in done:
            end(run, "", done[run.folder], "done before")
    if grid.on == "ray":
        doing = on_ray(todo, grid)
    elif grid.jobs > 1:
        doing = in_processes(todo, grid.jobs, tell)
    else:
        shared = LoadCache(stages=TensorStore.of_user())
        doing = ((each, attempt(each, shared, make_display())) for each in todo)
    try:
        with closing(doing):
            for run, error in doing:
                end(run, error, None if error else known.find(run))
        for run in runs:  # another bench in this folder may have finished a run in the meantime
            if outcomes[run.folder].result is None and (result := known.find(run)) is not None:
                end(run, "", result, "done by another process")
    except KeyboardInterrupt as stop:
        counts = f"stopped after {len(outcomes)} of {len(runs)} runs"
        raise KeyboardInterrupt(f"{counts}; the same command continues") from stop
    return [replace(outcomes[each.folder], planned=each) for each in planned]


def _name(run: PlannedRun, runs: Sequence[PlannedRun]) -> str:
    """The label of a run, with class order and tasks only where the grid has several."""
    order = f", {run.spec.order}" if len({each.spec.order for each in runs}) > 1 else ""
    tasks = f" in {run.spec.tasks} tasks" if len({each.spec.tasks for each in runs}) > 1 else ""
    return f"{run.label} on {run.spec.data}{tasks}{order}, seed {run.spec.seed}"


def distinct(planned: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Each run once: two rows of a table may be the same run."""
    found: dict[Path, PlannedRun] = {}
    for each in planned:
        found.setdefault(each.folder, each)
    return list(found.values())


def lines_of(outcomes: Sequence[RunOutcome], table: str = "") -> list[Line]:
    """A line of the table for each label, dataset and number of tasks, in the order of the grid."""
    members: dict[tuple[str, str, int | None], list[RunOutcome]] = {}
    for each in outcomes:
        members.setdefault(each.planned.line, []).append(each)
    lines = []
    for (label, data, tasks), own in members.items():
        results = [each.result for each in own if each.result is not None]
        group = Group(label, group_runs(results)[0].runs) if results else None
        paper = (group.paper_result(table) or group.paper_result()) if group else None
        lines.append(Line(label, data, group.first.tasks if group else tasks, group, paper, len(own) - len(results)))
    return lines


class FinishedRuns:
    """Finds the results of a run in its own folder, or among kept runs (folders of runs or of evidence)."""

    def __init__(self, kept: Sequence[Path] = ()) -> None:
        runs = find_runs(kept)
        self._kept = {_options_key(run.config): run for run in runs}
        self._devices = {_options_key(run.config, "device"): str(run.run.get("device")) for run in runs}

    def find(self, planned: PlannedRun) -> RunRecord | None:
        """The results of exactly these options and settings; None where the run is not finished, or cannot be run."""
        if planned.problem:
            return None
        if (done := finished_run(planned.folder, planned.spec, planned.config)) is not None:
            return done
        kept = self._kept.get(_options_key(planned.table))
        return None if inputs(planned.spec, planned.config) else kept  # kept runs have no digests

    def state(self, planned: PlannedRun) -> str:
        """How far a run is, as a word for a table."""
        if planned.problem:
            return "cannot be run"
        if self.find(planned) is not None:
            return "finished"
        return "begun" if (planned.folder / "config.toml").is_file() else "waiting"

    def on_other_devices(self, unfinished: Sequence[PlannedRun]) -> list[str]:
        """A line for each other device that has kept results of the runs, and the option that uses them.

        The device is part of a run's identity: `auto` on a machine with a GPU does not find runs of a CPU.
        """
        runs = [each for each in unfinished if not each.problem]
        asked = ", ".join(sorted({each.spec.device for each in runs}))
        devices = Counter(self._devices.get(_options_key(each.table, "device"), "") for each in runs)
        return [
            f"{count} of the runs are kept from device {device} and are not used here, where the device is {asked};"
            f" --device {device} uses them, and does the rest there"
            for device, count in sorted(devices.items())
            if device
        ]


def _options_key(table: dict[str, Any], *without: str) -> str:
    """Options and settings as text, without unset options and without the folder of a dataset that has a name."""
    run = {key: value for key, value in table["run"].items() if value is not None and key not in without}
    if "increment" not in run:
        run.setdefault("tasks", TASKS)
    if run["data"] not in ANYTHING:
        run.pop("data_root", None)
    return json.dumps([run, table["method"]], sort_keys=True, default=str)


def _add_to_log(path: Path, outcome: RunOutcome) -> None:
    """Add the line of a run that ended to `results.jsonl`; no line is ever removed."""
    planned, result, spec = outcome.planned, outcome.result, outcome.planned.spec
    line: dict[str, Any] = {"run": planned.folder.name, "status": "done" if result else "failed"}
    line |= {"label": planned.label, "method": spec.method, "data": spec.data, "seed": spec.seed}
    line |= {"backbone": spec.backbone, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    if result is None:
        line["error"] = outcome.error
    else:
        line |= {"tasks": result.tasks, **{key: getattr(result, key) for key in NUMBERS}}
        line |= {"seconds": round(result.seconds, 3), "after": result.after}
    with open_log(path) as file:
        # A process killed while it wrote left half a line: do not lengthen it.
        torn = file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
        file.write(b"\n" * bool(torn) + json.dumps(line).encode() + b"\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of `results.jsonl`; half a line, left by a process that was killed, is skipped."""
    try:
        data = read_bytes(path)
    except MissingFileError:
        return []
    if data and not data.startswith(b'{"run": '):
        raise UserError(f"{path} exists and is not the log of a bench; name another folder with --out")
    lines = []
    for text in data.decode(errors="replace").splitlines():
        with suppress(UserError):
            lines.append(typed(parse_json(text, str(path)), dict[str, Any]))
    return lines


def attempt(
    planned: PlannedRun, shared: LoadCache | None = None, display: Display | None = None, patience: float = 0
) -> str:
    """Do a run, or continue it from its checkpoint; returns why it failed, in one line.

    It waits up to `patience` seconds for another process to release the folder. A worker process has one cache.
    """
    if planned.problem:
        return planned.problem
    prepare_process()
    until = time.monotonic() + patience
    while True:
        try:
            experiment = Experiment.of(planned.spec, planned.config, shared or worker_cache())
            experiment.run(planned.folder, display=display or Display())
            (planned.folder / ERROR).unlink(missing_ok=True)
            return ""
        except UserError as error:
            if not isinstance(error, InUseError) or time.monotonic() >= until:
                return str(error)
            time.sleep(0.5)
        except Exception as error:  # whatever a method raises: the other runs do not depend on it
            write_text(planned.folder / ERROR, traceback.format_exc())
            return f"{type(error).__name__}: {first_line(error)} (see {planned.folder / ERROR})"


@cache
def worker_cache() -> LoadCache:
    """Backbones, datasets, features and stages that the runs of a worker process share."""
    return LoadCache(stages=TensorStore.of_user())


def in_processes(
    todo: Sequence[PlannedRun], jobs: int, tell: Callable[[str], None]
) -> Generator[tuple[PlannedRun, str]]:
    """`jobs` runs at a time, each in a process with one thread. A run whose process dies is continued by another.

    Each process has an executor of its own: one that dies would take the others of its executor with it.
    """
    TensorStore.of_user()  # an invalid size of the cache is refused here, not in every process
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # Python's helper process keeps this: it must end after this one
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    waiting, begun = deque(todo), Counter[Path]()
    idle: list[ProcessPoolExecutor] = []
    busy: dict[Future[str], tuple[PlannedRun, ProcessPoolExecutor]] = {}
    threads, others = os.environ.get(THREADS), set(multiprocessing.active_children())
    os.environ[THREADS] = "1"
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                worker = idle.pop() if idle else ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin)
                with suppress(BrokenProcessPool):  # it died while it had nothing to do
                    busy[worker.submit(attempt, waiting[0])] = waiting[0], worker
                    begun[waiting.popleft().folder] += 1
            for ended in wait(busy, return_when=FIRST_COMPLETED).done:
                run, worker = busy.pop(ended)
                if ended.exception() is None:
                    idle.append(worker)
                    yield run, ended.result()
                elif begun[run.folder] < ATTEMPTS:
                    tell(f"the process of {run.folder.name} died; another continues from its checkpoint")
                    waiting.append(run)
                else:
                    yield run, f"its process died {ATTEMPTS} times"
    finally:
        for child in {*multiprocessing.active_children()} - others:
            child.kill()  # every file is written whole: unfinished runs can be continued
        os.environ.pop(THREADS)
        if threads is not None:
            os.environ[THREADS] = threads


def _begin() -> None:
    """Prepare a worker process: it ignores Ctrl-C, which its parent handles, and ends when its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def on_ray(todo: Sequence[PlannedRun], grid: Grid) -> Generator[tuple[PlannedRun, str]]:
    """Each run as a Ray task with the resources asked for. A run whose machine is lost continues on another."""
    if not todo:
        return
    begun = need_ray().is_initialized()
    ray = connect(grid.address)
    mark = grid.out.absolute() / f".shared-{uuid.uuid4().hex}"
    mark.touch()
    waiting: dict[Any, PlannedRun] = {}
    try:
        given = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        options = {"num_cpus": grid.cpus_per_run, "num_gpus": grid.gpus_per_run, "max_retries": ATTEMPTS - 1}
        task = ray.remote(_attempt_on_ray).options(**options, runtime_env={"env_vars": given})
        waiting = {task.remote(each, str(Path.cwd()), mark): each for each in todo}
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            run = waiting.pop(done)
            try:
                yield run, str(ray.get(done))
            except ray.exceptions.RayTaskError as error:
                raise UserError(first_line(error.cause)) from error
            except ray.exceptions.RayError as error:  # a worker died too often, or could not be set up
                yield run, f"its worker was lost: {first_line(error)}"
    finally:
        for left in waiting:
            ray.cancel(left, force=True)  # every file is written whole: unfinished runs can be continued
        mark.unlink(missing_ok=True)
        if not begun:
            ray.shutdown()


def _attempt_on_ray(planned: PlannedRun, here: str, mark: Path) -> str:
    """A run, in a worker of Ray; returns why it failed. A machine that does not share the grid's folder is refused."""
    if not (Path(here).is_dir() and mark.exists()):
        raise UserError(
            f"machine {platform.node()} of the cluster cannot be used: {mark.parent} is not the folder that it is"
            " here; --out must be a folder that all machines share and may write to"
        )
    os.chdir(here)
    return attempt(planned, patience=PATIENCE)  # the worker before it may still hold the folder

"""Executing the runs of a grid: in this process, in several processes of this machine, or as tasks of a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import threading
import time
import traceback
import uuid
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cache
from pathlib import Path

from clipcil.cluster import connect, need_ray
from clipcil.errors import UserError, first_line
from clipcil.experiment.experiment import Experiment, LoadCache
from clipcil.experiment.folder import ERROR
from clipcil.experiment.grid import PlannedRun
from clipcil.experiment.monitor import Display
from clipcil.experiment.spec import Grid
from clipcil.storage import InUseError, write_text
from clipcil.tensor_store import SIZE, TensorStore
from clipcil.training.cpu import prepare_process

ATTEMPTS = 3
"""Maximum number of attempts at a run whose process dies, each from its last checkpoint."""
PATIENCE = 120
"""Seconds that a run on Ray waits for an earlier attempt at it to release its folder."""
THREADS = "OMP_NUM_THREADS"
"""Environment variable that torch reads when it is imported."""
ENVIRONMENT = ("CLIPCIL_CACHE", SIZE, "OMP_WAIT_POLICY", "HF_HOME", "HF_HUB_OFFLINE")
"""Environment variables that a worker of Ray is given as they are here."""

Ending = tuple[PlannedRun, str]
"""A run that has ended, and why it failed; empty where it went well."""


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


def in_this_process(todo: Iterable[PlannedRun], make_display: Callable[[], Display] = Display) -> Generator[Ending]:
    """One run after the other; backbones, datasets and features of towers that are not tuned are shared."""
    shared = LoadCache(stages=TensorStore.of_user())
    for each in todo:
        yield each, attempt(each, shared, make_display())


def in_processes(todo: Sequence[PlannedRun], jobs: int, tell: Callable[[str], None]) -> Generator[Ending]:
    """`jobs` runs at a time, each in a process with one thread. A run whose process dies is continued by another.

    Each process has an executor of its own: one that dies would take the others of its executor with it.
    """
    TensorStore.of_user()  # an invalid size of the cache is refused here, not in every process
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
    """A worker process begins: it leaves Ctrl-C, which all processes of a terminal receive, to its parent, and ends
    with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def on_ray(todo: Sequence[PlannedRun], grid: Grid) -> Generator[Ending]:
    """Each run as a Ray task with the resources asked for. A run whose machine is lost continues on another."""
    if not todo:
        return
    begun = need_ray().is_initialized()
    ray = connect(grid.address)
    grid.out.mkdir(parents=True, exist_ok=True)
    mark = grid.out.absolute() / f".shared-{uuid.uuid4().hex}"
    mark.touch()
    try:
        given = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        options = {"num_cpus": grid.cpus_per_run, "num_gpus": grid.gpus_per_run, "max_retries": ATTEMPTS - 1}
        task = ray.remote(_attempt_on_ray).options(**options, runtime_env={"env_vars": given})
        waiting = {task.remote(each, str(Path.cwd()), mark): each for each in todo}
        try:
            while waiting:
                for done in ray.wait(list(waiting), num_returns=1)[0]:
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
    finally:
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

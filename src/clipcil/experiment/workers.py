"""Executing the runs of a grid: in this process, or in several processes on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from clipcil.errors import UserError, first_line
from clipcil.experiment.display import Display
from clipcil.experiment.experiment import Experiment, LoadCache
from clipcil.experiment.folder import ERROR
from clipcil.experiment.grid import PlannedRun
from clipcil.files import write_text
from clipcil.tensor_store import TensorStore
from clipcil.training.cpu import prepare_process

ATTEMPTS = 3
"""Maximum number of attempts at a run whose process dies, each from its last checkpoint."""

Ending = tuple[PlannedRun, str]
"""A run that has ended, and why it failed; empty where it went well."""


def attempt(planned: PlannedRun, cache: LoadCache, display: Display, raises: type[UserError] | None = None) -> str:
    """Do a run, or continue it from its checkpoint; returns why it failed, in one line.

    An error of the kind `raises` is raised instead.
    """
    if planned.problem:
        return planned.problem
    prepare_process()
    try:
        Experiment.of(planned.spec, planned.config, cache).run(planned.folder, display=display)
        (planned.folder / ERROR).unlink(missing_ok=True)
        return ""
    except UserError as error:
        if raises is not None and isinstance(error, raises):
            raise
        return str(error)
    except Exception as error:  # whatever a method raises: the other runs do not depend on it
        write_text(planned.folder / ERROR, traceback.format_exc())
        return f"{type(error).__name__}: {first_line(error)} (see {planned.folder / ERROR})"


def in_this_process(todo: Iterable[PlannedRun], make_display: Callable[[], Display] = Display) -> Generator[Ending]:
    """One run after the other; backbones, datasets and features of towers that are not tuned are shared."""
    cache = LoadCache(stages=TensorStore.of_user())
    for each in todo:
        yield each, attempt(each, cache, make_display())


def in_processes(todo: Sequence[PlannedRun], jobs: int, tell: Callable[[str], None]) -> Generator[Ending]:
    """`jobs` runs at a time, each in a process with one thread. A run whose process dies is continued by another."""
    TensorStore.of_user()  # a bound that is no number is refused here, not in every process
    waiting, begun = deque(todo), dict.fromkeys((each.folder for each in todo), 0)
    idle: list[_Process] = []
    busy: dict[Any, _Process] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                worker = idle.pop() if idle else _Process()
                if worker.give(waiting[0]):
                    begun[waiting.popleft().folder] += 1
                    busy[worker.pipe] = worker
            for pipe in wait(list(busy)):
                worker = busy.pop(pipe)
                error = worker.answer()
                if error is not None:
                    idle.append(worker)
                    yield worker.run, error
                elif begun[worker.run.folder] < ATTEMPTS:
                    tell(f"the process of {worker.run.folder.name} died; another continues from its checkpoint")
                    waiting.append(worker.run)
                else:
                    yield worker.run, f"its process died {ATTEMPTS} times"
    finally:
        for worker in (*idle, *busy.values()):
            worker.process.kill()  # every file is written whole: what was under way can be continued


class _Process:
    """A process that does one run after the other, and the pipe to it."""

    run: PlannedRun

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,), daemon=True)
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # read by the new process when it imports torch
        try:
            self.process.start()
        finally:
            os.environ.pop("OMP_NUM_THREADS")
            if threads is not None:
                os.environ["OMP_NUM_THREADS"] = threads
        other.close()

    def give(self, run: PlannedRun) -> bool:
        """Hand over a run; False where the process has died."""
        self.run = run
        try:
            self.pipe.send(run)
        except OSError:
            return False
        return True

    def answer(self) -> str | None:
        """Why the run failed, empty where it went well; None where the process died."""
        try:
            return str(self.pipe.recv())
        except (EOFError, OSError):
            self.process.join()
            return None


def _serve(pipe: Connection) -> None:
    """The loop of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the first one decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    cache = LoadCache(stages=TensorStore.of_user())
    while True:
        try:
            planned = pipe.recv()
        except EOFError:
            return
        pipe.send(attempt(planned, cache, Display()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

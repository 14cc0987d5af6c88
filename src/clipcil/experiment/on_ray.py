"""The runs of a grid as tasks of a Ray cluster. The folder of the grid lies on storage that all machines share."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Generator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from clipcil.cluster import connect, need_ray
from clipcil.errors import UserError, first_line
from clipcil.experiment.display import Display
from clipcil.experiment.experiment import LoadCache
from clipcil.experiment.grid import PlannedRun
from clipcil.experiment.spec import Grid
from clipcil.experiment.workers import ATTEMPTS, Ending, attempt
from clipcil.files import InUseError
from clipcil.tensor_store import SIZE, TensorStore

PATIENCE = 120
"""Seconds that a run waits for the process before it, on a machine that was lost, to let go of its folder."""
ENVIRONMENT = ("CLIPCIL_CACHE", SIZE, "OMP_WAIT_POLICY", "HF_HOME", "HF_HUB_OFFLINE")
"""Environment variables that a worker is given as they are here."""


@cache
def _shared() -> LoadCache:
    """What the runs that follow each other in one worker process share."""
    return LoadCache(stages=TensorStore.of_user())


def on_ray(todo: Sequence[PlannedRun], grid: Grid) -> Generator[Ending]:
    """Each run as a Ray task with the resources asked for. A run whose machine is lost continues on another.

    Raises:
        UserError: Ray is not there, or a machine cannot write to the folder of the grid.
    """
    if not todo:
        return
    here, given = str(Path.cwd()), {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    begun = need_ray().is_initialized()
    ray = connect(grid.address)
    try:
        surroundings = {"runtime_env": {"env_vars": given}}  # the same for all tasks: worker processes are used again
        _check_storage(ray, grid.out, here, surroundings)
        resources = {"num_cpus": grid.cpus_per_run, "num_gpus": grid.gpus_per_run}
        task = ray.remote(_attempt).options(**resources, max_retries=ATTEMPTS - 1, **surroundings)
        waiting = {task.remote(each, here): each for each in todo}
        try:
            while waiting:
                for done in ray.wait(list(waiting), num_returns=1)[0]:
                    yield waiting.pop(done), _answer(ray, done)
        finally:
            for left in waiting:
                ray.cancel(left, force=True)  # every file is written whole: what was under way can be continued
    finally:
        if not begun:
            ray.shutdown()


def _attempt(planned: PlannedRun, here: str) -> str:
    """A run, in a worker of Ray; returns why it failed."""
    os.chdir(here)
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return attempt(planned, _shared(), Display(), raises=InUseError)
        except InUseError as error:  # the worker before it is not quite dead yet
            if time.monotonic() > until:
                return str(error)
            time.sleep(0.5)


def _answer(ray: Any, done: Any) -> str:
    try:
        return str(ray.get(done))
    except ray.exceptions.RayError as error:  # a worker that died too often, or that could not be set up
        return f"its worker was lost: {first_line(error)}"


def _check_storage(ray: Any, out: Path, here: str, surroundings: dict[str, Any]) -> None:
    """Have every machine find a file of ours in the folder of the grid and write one beside it."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    out.mkdir(parents=True, exist_ok=True)
    mark = out.absolute() / f".shared-{uuid.uuid4().hex}"
    mark.touch()
    try:
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        task, at = ray.remote(_try_writing), NodeAffinitySchedulingStrategy
        places = {name: {"num_cpus": 0, "scheduling_strategy": at(name, soft=False), **surroundings} for name in nodes}
        asked = {name: task.options(**place).remote(mark, here) for name, place in places.items()}
        for name, answer in asked.items():
            try:
                reason = str(ray.get(answer))
            except ray.exceptions.TaskUnschedulableError:  # the machine left in the meantime; the others do its runs
                continue
            except ray.exceptions.RayError as error:
                reason = f"its worker was lost: {first_line(error)}"
            if reason:
                raise UserError(f"machine {nodes[name]} of the cluster cannot be used: {reason}; --out must be a folder"
                                " that all machines share and may write to")  # fmt: skip
    finally:
        mark.unlink(missing_ok=True)


def _try_writing(mark: Path, here: str) -> str:
    try:
        os.chdir(here)
        if not mark.exists():
            return f"{mark.parent} is not the folder that it is here"
        beside = mark.with_name(f"{mark.name}-{uuid.uuid4().hex}")
        beside.touch()
        beside.unlink()
    except OSError as error:
        return f"{error.filename} cannot be written to: {error.strerror}"
    return ""

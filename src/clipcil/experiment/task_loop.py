"""The task loop: learn the tasks in their order, evaluate after each, keep what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clipcil.data.stream import Task, TaskStream
from clipcil.errors import UserError
from clipcil.experiment.device import usual_torch
from clipcil.experiment.drift import copy_memory, measure_drift
from clipcil.experiment.evaluate import Record, evaluate
from clipcil.experiment.loading import Parts
from clipcil.experiment.monitor import RunMonitor
from clipcil.experiment.results import Results
from clipcil.experiment.spec import RunSpec, as_table
from clipcil.memory.gaussians import GaussianMemory
from clipcil.methods.base import Method
from clipcil.training.own_random import OwnState


class TaskLoop:
    """An experiment that is loaded, and how far it has come.

    Args:
        spec: Options of the experiment.
        config: Settings of the method.
        parts: What was loaded for them.
        monitor: Monitor of the session in which the method learns.
        random: The random state in which the method was built, and in which it learns.
        folder: Folder of the run; None where the tasks are learnt one by one in Python.
    """

    records: list[Record]
    """What was counted after each task."""
    drift: list[dict[str, float] | None]
    """Drift of the stored Gaussians after each task."""

    def __init__(
        self, spec: RunSpec, config: Any, parts: Parts, monitor: RunMonitor, random: OwnState, folder: Path | None
    ) -> None:
        self.spec, self.config, self.parts = spec, config, parts
        self.monitor, self.random, self.folder = monitor, random, folder
        self.records, self.drift = [], []
        self._newest: Task | None = None  # handed out by the iterator
        self._interrupted: int | None = None  # index of a task whose learning did not end
        self._before: GaussianMemory | None = None  # of the method before the task learnt last

    @property
    def method(self) -> Method:
        return self.parts.learner.method

    @property
    def stream(self) -> TaskStream:
        return self.parts.stream

    def __iter__(self) -> Iterator[Task]:
        """The tasks that are not learnt yet. A task's pictures cannot be read once the next task is asked for."""
        self._check_whole()
        # Kept in an attribute: its tasks end when the iterator is deleted.
        self._tasks = self._hand_out(self.stream.tasks(len(self.method.sizes)))
        return self._tasks

    def _hand_out(self, tasks: Iterator[Task]) -> Iterator[Task]:
        for task in tasks:
            self._newest = task
            yield task

    def learn(self, task: Task) -> None:
        """Learn the next task; see `Experiment.learn`."""
        learner = self.parts.learner
        self._check_whole()
        learner.check(task)
        if self._newest is None or not task.pictures.of_one_task(self._newest.pictures):
            raise UserError("this task is of another experiment; learn the tasks that iterating over this one gives")
        if self.method.sizes:
            self.evaluate()
        self.monitor.begin_task(task.index)
        self._before = copy_memory(self.method)
        self._interrupted = task.index
        with self.monitor.phase("learning"), usual_torch(self.method.device), self.random.active():
            learner.learn(task)
        self._interrupted = None

    def evaluate(self) -> Results:
        """Evaluate after the newest task, unless that is done; see `Experiment.evaluate`."""
        self._check_whole()
        newest = len(self.method.sizes) - 1
        if newest < 0:
            raise UserError("no task is learnt yet; learn one before evaluating")
        if len(self.records) <= newest:
            with self.monitor.phase("evaluation"), usual_torch(self.method.device):
                record = evaluate(self.method, self.stream, newest, self.spec.test_sample)
            with self.monitor.phase("drift"), usual_torch(self.method.device):
                before = self._before
                drift = measure_drift(before, self.method, self.stream, newest) if before is not None else None
            self.records.append(record)  # both or, where one was interrupted, neither
            self.drift.append(drift)
        return self._measured()

    @property
    def results(self) -> Results:
        """Results after every task learnt so far; where learning was interrupted, after those before."""
        return self._measured() if self._interrupted is not None and self.records else self.evaluate()

    def _measured(self) -> Results:
        notes = self.method.notes()
        if count := self.spec.hold_out:
            notes = [*notes, f"measured on {count} held-out training pictures per class, not on the test pictures"]
        table, stream = as_table(self.spec, self.config), self.stream
        return Results(table, stream.names, stream.sizes, list(self.records), list(self.drift), notes)

    def _check_whole(self) -> None:
        if self._interrupted is not None:
            raise UserError(
                f"learning task {self._interrupted + 1} was interrupted, so the method is in no state to go on;"
                " make a new Experiment, or use run(folder), which continues"
            )


def title_of(spec: RunSpec, kind: type[Method], stream: TaskStream | None) -> str:
    """One line about an experiment, with the number of its classes and tasks once the stream is known."""
    tasks = f": {len(stream.names)} classes in {len(stream)} tasks" if stream is not None else ""
    return f"{kind.title} on {spec.data}{tasks}, backbone {spec.backbone}, seed {spec.seed}, device {spec.device}"

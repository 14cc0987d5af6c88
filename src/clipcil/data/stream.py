"""A stream of tasks: new classes arrive a few at a time, and a task that has ended cannot be read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

from clipcil.data.dataset import Dataset
from clipcil.data.pictures import PictureSet
from clipcil.data.reader import Gate, Pictures, Reader
from clipcil.errors import UserError


@dataclass(frozen=True)
class Task:
    """The input of a method: the new classes and their training pictures, nothing else."""

    index: int
    names: list[str]
    """Names of the new classes, in the order of their labels."""
    pictures: Pictures
    """Training pictures of these classes only; their labels continue those of earlier tasks."""


def task_sizes(
    classes: int, tasks: int | None = None, increment: int | None = None, base: int | None = None
) -> list[int]:
    """Number of classes of each task.

    `tasks`: number of tasks of equal size (the last is smaller if the classes do not divide evenly); `increment`:
    number of classes per task; `base`: size of the first task, where the others follow `tasks` or `increment`.
    """
    for what, value in (("tasks", tasks), ("increment", increment), ("base", base)):
        if value is not None and not 1 <= value <= classes:
            raise UserError(f"{what} is {value}; it must lie between 1 and the {classes} classes of the dataset")
    if tasks is not None and increment is not None:
        raise UserError("give the number of tasks or the increment, not both")
    first = [base] if base is not None else []
    rest = classes - sum(first)
    if increment is not None:
        return first + [min(increment, rest - done) for done in range(0, rest, increment)]
    parts = (tasks if tasks is not None else max(1, min(10, classes))) - len(first)
    if tasks is None and base is not None:
        parts = min(parts, rest)  # ten tasks are only the default
    if parts < 0 or (parts == 0) != (rest == 0) or parts > rest:
        raise UserError(f"{tasks or 10} tasks do not fit a base task of {base} of {classes} classes: {rest} are left")
    if rest == 0:
        return first
    size = -(-rest // parts)
    if size * (parts - 1) < rest:
        return first + [min(size, rest - done) for done in range(0, rest, size)]
    # Rounding up would use the classes too early (100 classes in 30 tasks): spread what is left evenly instead.
    return first + [rest // parts + (i < rest % parts) for i in range(parts)]


class TaskStream:
    """The tasks of a dataset in a class order. Iterating hands out each task once and closes the one before."""

    def __init__(self, dataset: Dataset, reader: Reader, order: Sequence[int], sizes: Sequence[int]) -> None:
        self.dataset, self.sizes = dataset, list(sizes)
        self.names = [dataset.classes[index] for index in order]
        self._reader = reader
        if sorted(order) != list(range(len(dataset.classes))) or sum(sizes) != len(order) or min(sizes) < 1:
            raise UserError(
                f"tasks of {list(sizes)} classes do not cover the {len(dataset.classes)} of {dataset.name} once"
            )
        bounds = torch.cumsum(torch.tensor([0, *sizes]), 0).tolist()
        self._train = _by_task(dataset.train, order, bounds)
        self._test = _by_task(dataset.test, order, bounds)
        for index, name in enumerate(self.names):
            task = next(t for t, end in enumerate(bounds[1:]) if index < end)
            if not bool((self._train[task].labels == index).any()):
                raise UserError(f"class '{name}' of {dataset.name} has no training pictures")
            if not len(self._test[task]):
                raise UserError(
                    f"no class of task {task + 1} of {dataset.name} ('{name}', …) has a test picture to evaluate it on;"
                    " give it some, or make the tasks larger"
                )
        self._bounds = bounds

    def __len__(self) -> int:
        return len(self.sizes)

    def tasks(self, start: int = 0) -> Iterator[Task]:
        """The tasks from `start` on, each closed when the next is asked for."""
        for index in range(start, len(self)):
            gate = Gate()
            pictures = Pictures(self._reader, self._train[index], torch.arange(len(self._train[index])), gate)
            try:
                yield Task(index, self.names[self._bounds[index] : self._bounds[index + 1]], pictures)
            finally:
                gate.open = False
                self._reader.forget(self._train[index])

    def test(self, index: int) -> Pictures:
        """The test pictures of task `index`. For evaluation only: no method is ever given the stream."""
        return self._reader.open(self._test[index])

    @contextmanager
    def trained(self, index: int, most: int) -> Iterator[Pictures]:
        """Training pictures of a task that has ended, at most `most` of each class, evenly spread.

        For measuring drift only: no method is ever given the stream.
        """
        labels = self._train[index].labels
        counts = torch.bincount(labels)[labels]
        place = torch.arange(len(labels)) - torch.searchsorted(labels, labels)  # labels are sorted
        kept = torch.minimum(counts, torch.tensor(most))
        part = self._train[index].subset(torch.nonzero(place * kept % counts < kept).flatten())
        try:
            yield self._reader.open(part)
        finally:
            self._reader.forget(part)

    def test_set(self, index: int) -> PictureSet:
        return self._test[index]


def _by_task(pictures: PictureSet, order: Sequence[int], bounds: Sequence[int]) -> list[PictureSet]:
    place = torch.empty(len(order), dtype=torch.int64)
    place[torch.tensor(list(order))] = torch.arange(len(order))
    labels = place[pictures.labels]
    tasks = []
    for first, last in pairwise(bounds):
        keep = torch.nonzero((labels >= first) & (labels < last)).flatten()
        keep = keep[torch.argsort(labels[keep], stable=True)]
        tasks.append(pictures.subset(keep, labels[keep]))
    return tasks

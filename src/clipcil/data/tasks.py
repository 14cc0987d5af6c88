"""From a dataset to tasks: splits into training and test pictures, class orders, and the stream of tasks."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clipcil.data.dataset import Dataset
from clipcil.data.pictures import PictureSet
from clipcil.data.reader import Gate, Pictures, Reader
from clipcil.errors import UserError
from clipcil.storage import read_text


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

    Args:
        classes: Number of classes in all.
        tasks: Number of tasks of equal size; the last is smaller if the classes do not divide evenly.
        increment: Or number of classes per task.
        base: Size of the first task, where the others follow `tasks` or `increment`.
    """
    for what, value in (("tasks", tasks), ("increment", increment), ("base", base)):
        if value is not None and not 1 <= value <= classes:
            raise UserError(f"{what} is {value}; it must lie between 1 and the {classes} classes of the dataset")
    if tasks is not None and increment is not None:
        raise UserError("give the number of tasks or the increment, not both")
    first = [base] if base is not None else []
    rest = classes - sum(first)
    if increment is None:
        parts = (tasks or min(10, classes)) - len(first)
        if tasks is None:
            parts = min(parts, rest)  # ten tasks are only the default
        if parts > rest or (rest and not parts):
            raise UserError(f"{tasks} tasks do not fit a base task of {base} of {classes} classes: {rest} are left")
        increment = -(-rest // parts) if parts else classes
        if increment * (parts - 1) >= rest > 0:
            # Rounding up would use the classes too early (100 classes in 30 tasks): spread what is left evenly instead.
            return first + [rest // parts + (i < rest % parts) for i in range(parts)]
    return first + [min(increment, rest - done) for done in range(0, rest, increment)]


class TaskStream:
    """The tasks of a dataset in a class order. `tasks()` hands out each task once and closes the one before."""

    def __init__(self, dataset: Dataset, reader: Reader, order: Sequence[int], sizes: Sequence[int]) -> None:
        self.dataset, self.sizes, self._reader = dataset, list(sizes), reader
        self.names = [dataset.classes[index] for index in order]
        self._bounds = [0, *accumulate(sizes)]
        self._train = _by_task(dataset.train, order, self._bounds)
        self._test = _by_task(dataset.test, order, self._bounds)
        for task, (first, last) in enumerate(pairwise(self._bounds)):
            if missing := set(range(first, last)) - set(self._train[task].labels.tolist()):
                raise UserError(f"class '{self.names[min(missing)]}' of {dataset.name} has no training pictures")
            if not len(self._test[task]):
                classes = f"task {task + 1} of {dataset.name} ('{self.names[first]}', …)"
                raise UserError(f"no class of {classes} has a test picture; give it some, or make the tasks larger")

    def __len__(self) -> int:
        return len(self.sizes)

    def tasks(self, start: int = 0) -> Iterator[Task]:
        """The tasks from `start` on, each closed when the next is asked for."""
        for index in range(start, len(self)):
            gate = Gate()
            names = self.names[self._bounds[index] : self._bounds[index + 1]]
            try:
                yield Task(index, names, self._reader.open(self._train[index], gate))
            finally:
                gate.open = False
                self._reader.forget(self._train[index])

    def test(self, index: int) -> Pictures:
        """The test pictures of task `index`. For evaluation only: no method is ever given the stream."""
        return self._reader.open(self._test[index])

    @contextmanager
    def trained(self, index: int, most: int, classes: int) -> Iterator[Pictures]:
        """Training pictures of a task that has ended, at most `most` of each of its first `classes`, evenly spread.

        For measuring drift only: no method is ever given the stream.
        """
        labels = self._train[index].labels
        counts = torch.bincount(labels)[labels]
        place = torch.arange(len(labels)) - torch.searchsorted(labels, labels)  # labels are sorted
        kept = torch.minimum(counts, torch.tensor(most))
        chosen = (place * kept % counts < kept) & (labels < labels[0] + classes)
        part = self._train[index].subset(torch.nonzero(chosen).flatten())
        try:
            yield self._reader.open(part)
        finally:
            self._reader.forget(part)

    def test_set(self, index: int) -> PictureSet:
        return self._test[index]


def _by_task(pictures: PictureSet, order: Sequence[int], bounds: Sequence[int]) -> list[PictureSet]:
    """The pictures of each task, sorted by their labels, which are places in `order`."""
    labels = torch.tensor(list(order)).argsort()[pictures.labels]
    rows = labels.argsort(stable=True)
    cuts = torch.searchsorted(labels[rows], torch.tensor(bounds))[1:-1]
    return [pictures.subset(part, labels[part]) for part in rows.tensor_split(cuts)]


def class_order(spec: str, classes: list[str]) -> list[int]:
    """The order in which classes arrive, as indices into `classes`.

    `natural`: the dataset's own; `seed:N`: numpy's legacy permutation by seed N (`seed:1993` is the order most of the
    field uses: 68, 56, 78, … for 100 classes); `icarl`: the list of iCaRL for CIFAR-100; otherwise the path of a text
    file with one class per line, by index or by name.
    """
    count = len(classes)
    if spec == "natural":
        return list(range(count))
    if spec.startswith("seed:"):
        if not re.fullmatch("[0-9]{1,10}", spec[5:]) or int(spec[5:]) >= 2**32:
            raise UserError(f"class order '{spec}': write seed:N with a whole number N below 2^32, such as seed:1993")
        # The legacy generator, on purpose: its permutations are what published class orders are.
        return [int(i) for i in np.random.RandomState(int(spec[5:])).permutation(count)]
    if spec == "icarl":
        if count != len(ICARL):
            raise UserError(f"class order 'icarl' is a list of {len(ICARL)} classes; this dataset has {count}")
        return list(ICARL)
    return _order_from_file(Path(spec), classes)


def _order_from_file(path: Path, classes: list[str]) -> list[int]:
    if not path.is_file():
        raise UserError(f"class order '{path}' is neither natural, seed:N, icarl nor an existing file")
    place = {str(index): index for index in range(len(classes))} | {name: i for i, name in enumerate(classes)}
    order: list[int] = []
    for line in read_text(path, links=True).splitlines():
        # A whole line may be a name with a comma or a hyphen in it; else it is a list, also as YAML and JSON write it.
        words = [line.strip()] if line.strip() in place else re.split(r"[,\[\]]|^\s*-\s+", line)
        for word in filter(None, (word.strip().strip("'\"") for word in words)):
            if word not in place:
                raise UserError(f"{path}: '{word[:60]}' is neither a class name nor an index below {len(classes)}")
            order.append(place[word])
    if sorted(order) != list(range(len(classes))):
        wrong = next(i for i in range(len(classes)) if order.count(i) != 1)
        times = f"'{classes[wrong]}' ({wrong}) occurs {order.count(wrong)} times"
        raise UserError(f"{path}: every one of the {len(classes)} classes must occur once; {times}")
    return order


ICARL = (
    87, 0, 52, 58, 44, 91, 68, 97, 51, 15, 94, 92, 10, 72, 49, 78, 61, 14, 8, 86,
    84, 96, 18, 24, 32, 45, 88, 11, 4, 67, 69, 66, 77, 47, 79, 93, 29, 50, 57, 83,
    17, 81, 41, 12, 37, 59, 25, 20, 80, 73, 1, 28, 6, 46, 62, 82, 53, 9, 31, 75,
    38, 63, 33, 74, 27, 22, 36, 3, 16, 21, 60, 19, 70, 90, 89, 43, 5, 42, 65, 76,
    40, 30, 23, 85, 2, 95, 56, 48, 71, 64, 98, 13, 99, 7, 34, 55, 54, 26, 35, 39,
)  # fmt: skip


def _lowest(names: Sequence[str], rows: Sequence[int], count: int, seed: int) -> Tensor:
    """The `count` rows whose names have the lowest SHA-256: the same on every machine and with every library."""

    def rank(row: int) -> bytes:
        return hashlib.sha256(f"{seed}/{names[row]}".encode("utf-8", "surrogateescape")).digest()

    return torch.tensor(sorted(rows, key=rank)[:count], dtype=torch.int64)


def split_whole(names: Sequence[str], share: float, seed: int) -> Tensor:
    """(N,) bool, True for test: `share` of all pictures, whatever their classes.

    The lists that circulate for ImageNet-R, and the field's split of CUB, are drawn like this: classes get between
    8 % and 28 % of test pictures. 30,000 pictures give exactly 24,000 and 6,000.
    """
    test = torch.zeros(len(names), dtype=torch.bool)
    train = int(len(names) * (1 - share) + 1e-9)
    test[_lowest(names, range(len(names)), len(names) - train, seed)] = True
    return test


def split_by_class(names: Sequence[str], labels: Tensor, share: float, seed: int) -> Tensor:
    """(N,) bool, True for test: `share` of every class, rounded; a class of two or more has both kinds."""
    test = torch.zeros(len(names), dtype=torch.bool)
    for label in torch.unique(labels).tolist():
        rows = torch.nonzero(labels == label).flatten().tolist()
        count = min(max(round(len(rows) * share), 1), len(rows) - 1)
        test[_lowest(names, rows, count, seed)] = True
    return test


def split_by_group(groups: Sequence[str], labels: Tensor, share: float, seed: int) -> Tensor:
    """(N,) bool, True for test: whole groups, `share` of the groups of every class."""
    of_class = list(zip(labels.tolist(), groups, strict=True))
    place = {pair: index for index, pair in enumerate(dict.fromkeys(of_class))}
    owner = torch.tensor([label for label, _ in place], dtype=torch.int64)
    test = split_by_class([f"{label}/{group}" for label, group in place], owner, share, seed)
    return test[torch.tensor([place[pair] for pair in of_class])]

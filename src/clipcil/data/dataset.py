"""A dataset: class names, training and test pictures, and templates for sentences about its classes."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from clipcil.data.names import ANYTHING, check_names
from clipcil.data.pictures import PictureSet, decoding_pool, identity_of_pictures
from clipcil.data.sources import as_picture
from clipcil.errors import UserError, nearest
from clipcil.plugins import home, load_file, names_file, pick, plugins
from clipcil.settings import build, options

CHECK_BATCH = 1024
"""Pictures that `drop_broken` decodes between two reports of progress."""


@dataclass(frozen=True)
class Dataset:
    """Training and test pictures of named classes. `clipcil.Experiment` takes one as `data`.

    Examples:
        >>> import clipcil
        >>> from PIL import Image
        >>> def plain(*colours): return [Image.new("RGB", (64, 64), colour) for colour in colours]
        >>> train = {"red": plain("red", "darkred"), "blue": plain("blue", "navy")}
        >>> data = clipcil.Dataset.from_pictures("colours", train, {"red": plain("crimson"), "blue": plain("cyan")})
        >>> len(data.train), data.test.labels.tolist()
        (4, [0, 1])
        >>> experiment = clipcil.Experiment("simplecil", data=data, tasks=2)
        >>> [task.names for task in experiment]
        [['red'], ['blue']]
    """

    name: str
    classes: list[str]
    """Readable class names, in the dataset's own order."""
    train: PictureSet
    """Training pictures; labels are indices into `classes`."""
    test: PictureSet
    """Test pictures."""
    templates: tuple[str, ...] = ("a photo of a {}.",)
    """Sentences about a class, `{}` standing for its name; methods that use a single sentence take the first."""
    notes: tuple[str, ...] = ()
    """Remarks about these pictures, such as lines of a list that were skipped."""

    @classmethod
    def from_pictures(
        cls,
        name: str,
        train: Mapping[str, Sequence[Any]],
        test: Mapping[str, Sequence[Any]],
        templates: tuple[str, ...] = ("a photo of a {}.",),
    ) -> Dataset:
        """A dataset of your own pictures; nothing is decoded yet.

        Args:
            name: Name of the dataset.
            train: Training pictures of each class by its name: paths, bytes of files, PIL images or arrays.
            test: Test pictures of the same classes.
            templates: Sentences about a class, `{}` standing for its name.
        """
        if not (isinstance(train, Mapping) and isinstance(test, Mapping)):
            raise UserError(f"{name}: give the pictures of each class, such as {{'cat': ['a.jpg', 'b.jpg']}}")
        classes = list(train)
        if unknown := [each for each in test if each not in train]:
            raise UserError(f"{name}: class '{unknown[0]}' has test pictures but no training pictures")

        def part(called: str, pictures: Mapping[str, Sequence[Any]]) -> PictureSet:
            every = [as_picture(each) for label in classes for each in pictures.get(label, ())]
            labels = [index for index, label in enumerate(classes) for _ in pictures.get(label, ())]
            return PictureSet(called, every, torch.tensor(labels, dtype=torch.int64), identity_of_pictures(every))

        return cls(name, classes, part(f"{name} train", train), part(f"{name} test", test), templates)

    def __post_init__(self) -> None:
        check_names(self.name, self.classes)
        count = len(self.classes)
        for pictures in (self.train, self.test):
            if wrong := [label for label in set(pictures.labels.tolist()) if not 0 <= label < count]:
                number = f"number them 0 to {count - 1}, or name all of them"
                raise UserError(f"{pictures.name}: label {wrong[0]} is outside the {count} classes; {number}")

    def shrink(self, per_class: int, seed: int) -> Dataset:
        """The same dataset with at most `per_class` training pictures of each class, drawn by the seed."""
        chosen = self._draw(np.random.default_rng(seed), per_class)
        return replace(self, train=self.train.subset(torch.from_numpy(chosen)))

    def hold_out(self, per_class: int, seed: int) -> Dataset:
        """The same dataset with some training pictures as its test pictures, for choosing settings.

        Every picture is drawn separately: of pictures that are nearly the same, such as frames of one clip, some may be
        in each part.

        Args:
            per_class: Number of training pictures of each class to measure on; they are not trained on.
            seed: Seed that decides which pictures are drawn.
        """
        counts = np.bincount(self.train.labels.numpy(), minlength=len(self.classes))
        fewest = int(counts.argmin())
        if counts[fewest] <= per_class:
            raise UserError(
                f"class '{self.classes[fewest]}' of {self.name} has {counts[fewest]} training pictures;"
                f" hold out fewer than that, not {per_class}"
            )
        held = self._draw(np.random.default_rng([seed, 1]), per_class)  # other draws than those of `shrink`
        rest = np.setdiff1d(np.arange(len(self.train)), held)
        train, test = (self.train.subset(torch.from_numpy(rows)) for rows in (rest, held))
        return replace(self, train=train, test=test)

    def _draw(self, generator: np.random.Generator, per_class: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Rows of at most `per_class` training pictures of each class."""
        labels = self.train.labels.numpy()
        of_class = [np.flatnonzero(labels == label) for label in range(len(self.classes))]
        return np.concatenate([np.sort(generator.permutation(rows)[:per_class]) for rows in of_class])


@options
class NoOptions:
    """The options of a dataset that has none."""


@options
class SplitOptions:
    """Options of a dataset that is split by seed where it has no test pictures of its own."""

    test_share: Annotated[float, Field(ge=0.001, le=0.999)] = 0.2
    """Share of the pictures that are test pictures, in a split by seed."""
    split_seed: int = 0
    """Seed that decides which pictures those are."""


Opener = Callable[[Path | None, Any], Dataset]
"""`open(root, options)`: the folder that holds the dataset where it needs one, and an instance of its options."""


@dataclass(frozen=True)
class Entry:
    """A registered dataset; its fields are the arguments of `register`."""

    open: Opener
    summary: str
    needs: str
    options: type


REGISTRY: dict[str, Entry] = {}


def register(name: str, summary: str, needs: str, options: type = NoOptions) -> Callable[[Opener], Opener]:
    """Decorator: register `open(root, options)` as dataset `name`.

    Args:
        name: Name on the command line.
        summary: What it is, in a few words.
        needs: The files it needs, in a few words; `nothing` where it comes with the package.
        options: A frozen dataclass of its options, with a docstring under each field.

    Raises:
        ValueError: Another dataset has that name.
    """

    def keep(opener: Opener) -> Opener:
        if name in REGISTRY and home(REGISTRY[name].open) != home(opener):  # a cell of a notebook may run again
            raise ValueError(f"two datasets are called '{name}'")
        REGISTRY[name] = Entry(opener, summary, needs, options)
        return opener

    return keep


def datasets() -> dict[str, Entry]:
    """All datasets by name: those of clipcil, and those of other packages by their entry point `clipcil.datasets`.

    Returns:
        Entries by name, each with a summary and the files it needs.

    Examples:
        >>> import clipcil
        >>> clipcil.datasets()["emoji"].needs
        'nothing'
    """
    for module in pkgutil.iter_modules([str(Path(__file__).parent / "datasets")]):
        importlib.import_module(f"clipcil.data.datasets.{module.name}")  # it registers its datasets, as plugins do
    plugins("clipcil.datasets")
    return dict(sorted(REGISTRY.items()))


def find_dataset(name: str) -> Entry:
    """The dataset called `name`."""
    known = datasets()
    if name not in known:
        raise UserError(f"there is no dataset '{name}'{nearest(name, known)}")
    return known[name]


def named_dataset(word: str) -> str:
    """The dataset that a user names: by its name, or by a file that registers it, which is executed: `shapes.py`, or
    `shapes.py:NAME` where it registers several. Other words, such as a folder, are returned as they are."""
    if not names_file(word):
        return word
    datasets()  # so that no name of clipcil is taken
    module = load_file(word).__name__
    return pick(word, {name: name for name, entry in REGISTRY.items() if entry.open.__module__ == module}, "dataset")


def resolve_options(name: str, given: Mapping[str, Any]) -> Any:
    """The dataset's options with what was given over their defaults."""
    kind = find_dataset(name).options
    try:
        return build(kind, given)
    except UserError as error:
        hint = f" (dataset {name} has no options)" if kind is NoOptions else f" (dataset {name})"
        raise UserError(f"{error}{hint}") from error


def open_dataset(name: str, root: Path | None = None, options: Mapping[str, Any] | None = None) -> Dataset:
    """The dataset called `name`; `root` is the folder that holds it, or its folder, where it needs one."""
    return find_dataset(name).open(own_folder(name, root), resolve_options(name, options or {}))


def own_folder(name: str, root: Path | None) -> Path | None:
    """`root/name` where `root` holds a folder for each dataset; otherwise `root` itself.

    Datasets that take any folder of pictures have no such folder: a class may have the name of the dataset.
    """
    if root is None or name in ANYTHING or not (root / name).is_dir():
        return root
    return root / name


def drop_broken(
    dataset: Dataset, on_progress: Callable[[str, int, int], None] = lambda what, done, total: None
) -> tuple[Dataset, list[str]]:
    """The dataset without the pictures that cannot be decoded, and a line for each of them.

    Every picture is decoded once to find out (and again when it is preprocessed for the first time). Labels and class
    names stay as they are; a class that loses its last training picture is reported when the stream is made.
    """
    lines: list[str] = []
    kept: list[PictureSet] = []
    total, done = len(dataset.train) + len(dataset.test), 0
    with decoding_pool() as pool:
        for pictures in (dataset.train, dataset.test):
            faults: list[str | None] = []
            for start in range(0, len(pictures), CHECK_BATCH):
                faults += pool.map(pictures.fault, range(len(pictures))[start : start + CHECK_BATCH])
                on_progress("check", done + len(faults), total)
            done += len(faults)
            lines += filter(None, faults)
            kept.append(pictures.subset(torch.tensor([fault is None for fault in faults], dtype=torch.bool)))
    return replace(dataset, train=kept[0], test=kept[1]), lines

"""A dataset: class names, training and test pictures, and how its classes are put into words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from clipcil.data.pictures import PictureSet
from clipcil.errors import UserError, nearest


@dataclass(frozen=True)
class Dataset:
    name: str
    classes: list[str]
    """Names as people say them, in the dataset's own order."""
    train: PictureSet
    test: PictureSet
    templates: tuple[str, ...] = ("a photo of a {}.",)
    """Sentences for a class name, `{}` standing for it; the first is the one used where only one is."""

    def shrink(self, per_class: int, seed: int) -> Dataset:
        """At most `per_class` training pictures of each class, drawn by `seed`; the test set stays whole."""
        if per_class < 1:
            raise UserError(f"shots is {per_class}; give at least 1 training picture per class")
        generator = np.random.default_rng(seed)
        labels = self.train.labels.numpy()
        keep = []
        for label in range(len(self.classes)):
            rows = np.flatnonzero(labels == label)
            keep.append(np.sort(generator.permutation(rows)[:per_class]))
        return replace(self, train=self.train.subset(torch.from_numpy(np.concatenate(keep))))


Opener = Callable[[Path | None], Dataset]


@dataclass(frozen=True)
class Entry:
    """One dataset that can be asked for by name."""

    open: Opener
    summary: str
    needs: str
    """What has to be there, in a few words."""


REGISTRY: dict[str, Entry] = {}


def register(name: str, summary: str, needs: str) -> Callable[[Opener], Opener]:
    """Make `open(root)` known as dataset `name`."""

    def keep(opener: Opener) -> Opener:
        REGISTRY[name] = Entry(opener, summary, needs)
        return opener

    return keep


def open_dataset(name: str, root: Path | None = None) -> Dataset:
    """The dataset called `name`; `root` is the folder that holds it, where it needs one."""
    import clipcil.data.catalogue  # noqa: F401  (fills the registry)

    if name not in REGISTRY:
        raise UserError(f"there is no dataset '{name}'{nearest(name, REGISTRY)}")
    return REGISTRY[name].open(root)

"""Sources of training pictures: a folder of class folders, a mapping of names to pictures, or a dataset."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clipcil.classifier.layout import check_layout
from clipcil.data.dataset import Dataset
from clipcil.data.datasets.folder import picture_files, read_tree
from clipcil.data.names import clean_name, need_text
from clipcil.data.pictures import Picture, PictureSet
from clipcil.data.sources import as_picture, list_files, no_pictures
from clipcil.errors import UserError
from clipcil.storage import is_folder

TEMPLATE = "a photo of a {}."

Source = str | Path | Mapping[str, Sequence[Any]] | Dataset
"""A class/picture tree, `{name: [pictures]}`, or a dataset (its training part)."""


def read_source(source: Source, subfolders: bool = False) -> Dataset:
    """The pictures to learn as a dataset without a test part; nothing is decoded yet.

    Args:
        source: A folder of class folders, `{name: [pictures]}`, or a dataset.
        subfolders: Whether a class folder may hold folders of pictures and no picture itself.

    Raises:
        UserError: It is none of these, or its folders do not look like classes.
    """
    if isinstance(source, Dataset):
        present = torch.unique(source.train.labels).tolist()
        place = torch.full((len(source.classes),), -1)
        place[present] = torch.arange(len(present))
        train = source.train.subset(torch.arange(len(source.train)), place[source.train.labels])
        return _learnable(source.name, [source.classes[label] for label in present], train, source.templates)
    if isinstance(source, Mapping):
        return _from_mapping(source)
    root = _folder(source)
    check_layout(root, subfolders)
    names, files, labels = read_tree(root)
    return _learnable(str(root), names, picture_files(str(root), root, files, labels))


def _folder(source: object) -> Path:
    if not isinstance(source, str | os.PathLike):
        said = "give a folder, {name: [pictures]} or a clipcil.Dataset"
        raise UserError(f"a {type(source).__name__} cannot be learnt; {said}")
    return Path(source)


def as_list(pictures: Any) -> tuple[list[Any] | Any, bool]:
    """One picture or many → something to iterate over, and whether it was one.

    Raises:
        UserError: An array that could be one picture or many.
    """
    if isinstance(pictures, str | bytes | Path | Image.Image):
        return [pictures], True
    if isinstance(pictures, np.ndarray | Tensor):
        shape = tuple(pictures.shape)
        if len(shape) == 4:
            return list(pictures), False
        if len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4)):
            return [pictures], True
        hint = "; its channels come first: give array.transpose(1, 2, 0)" if shape[:1] in ((1,), (3,), (4,)) else ""
        raise UserError(
            f"an array of shape {shape} is not clearly one picture or many; one is (height, width[, 3 or 4]), many are"
            f" (number, height, width, 3), or a list{hint}"
        )
    if not isinstance(pictures, Iterable):
        as_picture(pictures)  # says what it is, and what would be a picture
    return pictures, False


def expand(pictures: Sequence[str | Path]) -> list[Path]:
    """Files as they are, folders as the pictures below them."""
    found: list[Path] = []
    for picture in map(Path, pictures):
        if not is_folder(picture):
            found.append(picture)
            continue
        inside = list_files(picture)
        if not inside:
            raise no_pictures(picture)
        found += inside
    return found


def _from_mapping(source: Mapping[str, Sequence[Any]]) -> Dataset:
    pictures: list[Picture] = []
    labels: list[int] = []
    for label, (name, things) in enumerate(source.items()):
        several = isinstance(things, Sequence | np.ndarray | Tensor) and not isinstance(things, str | bytes)
        if not several or as_list(things)[1] or not len(things):
            raise UserError(f"class '{name}' needs a list of pictures, such as {{'{name}': ['a.jpg', 'b.jpg']}}")
        pictures += [as_picture(thing) for thing in things]
        labels += [label] * len(things)
    # Pictures in memory have no name to recognise them by, and nothing is kept of them anyway.
    train = PictureSet("pictures", pictures, torch.tensor(labels, dtype=torch.int64), uuid.uuid4().hex[:24])
    return _learnable("pictures", [clean_name(need_text(name)) for name in source], train)


def _learnable(name: str, classes: list[str], train: PictureSet, templates: tuple[str, ...] = (TEMPLATE,)) -> Dataset:
    return Dataset(name, classes, train, train.subset(torch.empty(0, dtype=torch.int64)), templates)

"""Sources of training pictures: a folder of class folders, a mapping of names to pictures, or a dataset.

A folder whose class folders are at the wrong level is refused, with a guess at what was meant. A list of corrections,
which the page of `clipcil test` exports, is a source like a folder.
"""

import csv
import io
import os
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clipcil.classifier.folder import MODEL
from clipcil.data.dataset import Dataset
from clipcil.data.datasets.folder import TEST, TRAIN, picture_files, read_tree
from clipcil.data.names import clean_name, need_text
from clipcil.data.pictures import Picture, PictureSet
from clipcil.data.sources import HEIC, SUFFIXES, as_picture, list_files, list_folders, no_pictures, walk
from clipcil.errors import UserError, counted, quoted
from clipcil.limits import MOST_OWN_TEXT
from clipcil.storage import read_text

NAMES_SHOWN = 3
"""Names shown of a longer list."""
TEMPLATE = "a photo of a {}."

FIXES = "fixes.csv"
"""A list of corrections: the columns `picture` (a path) and `class`."""

Source = str | Path | Mapping[str, Sequence[Any]] | Dataset
"""A class/picture tree, a list of corrections, `{name: [pictures]}`, or a dataset (its training part)."""


def read_source(source: Source, subfolders: bool = False) -> Dataset:
    """The pictures to learn as a dataset without a test part; nothing is decoded yet."""
    if isinstance(source, Dataset):
        present = torch.unique(source.train.labels).tolist()
        place = torch.full((len(source.classes),), -1)
        place[present] = torch.arange(len(present))
        train = source.train.subset(torch.arange(len(source.train)), place[source.train.labels])
        return _learnable(source.name, [source.classes[label] for label in present], train, source.templates)
    if isinstance(source, Mapping):
        pictures: list[Picture] = []
        labels: list[int] = []
        for label, (name, things) in enumerate(source.items()):
            several = isinstance(things, Sequence | np.ndarray | Tensor) and not isinstance(things, str | bytes)
            if not several or as_list(things)[1] or not len(things):
                raise UserError(f"class '{name}' needs a list of pictures, such as {{'{name}': ['a.jpg', 'b.jpg']}}")
            pictures += [as_picture(thing) for thing in things]
            labels += [label] * len(things)
        # Nothing is kept under the identity of this set, so it need not be computed from the pictures.
        train = PictureSet("pictures", pictures, torch.tensor(labels, dtype=torch.int64), uuid.uuid4().hex[:24])
        return _learnable("pictures", [clean_name(need_text(name)) for name in source], train)
    given: object = source
    if not isinstance(given, str | os.PathLike):
        kind = type(given).__name__
        raise UserError(f"a {kind} cannot be learnt; give a folder, {{name: [pictures]}} or a clipcil.Dataset")
    root = Path(given)
    if (fixes := find_fixes(root)) is not None:
        return read_source(read_fixes(fixes))
    check_layout(root, subfolders)
    names, files = read_tree(root)
    return _learnable(str(root), names, picture_files(str(root), root, files))


def _learnable(name: str, classes: list[str], train: PictureSet, templates: tuple[str, ...] = (TEMPLATE,)) -> Dataset:
    return Dataset(name, classes, train, train.subset(torch.empty(0, dtype=torch.int64)), templates)


def find_fixes(source: Path) -> Path | None:
    """The list of corrections that `source` is, or that lies in it instead of class folders."""
    if source.is_file():
        return source if source.suffix == ".csv" else None
    fixes = source / FIXES
    return fixes if fixes.is_file() and not list_folders(source) else None


def read_fixes(path: Path) -> dict[str, list[Path]]:
    """The pictures of each class in a list of corrections; paths are relative to the folder of the list."""
    found: dict[str, list[Path]] = {}
    for line in csv.DictReader(io.StringIO(read_text(path, MOST_OWN_TEXT, links=True), newline="")):
        if not line.get("picture") or not line.get("class"):
            raise UserError(
                f"{path} is not a list of corrections; it needs the columns picture and class in every line"
            )
        found.setdefault(line["class"], []).append(path.parent / line["picture"])
    if not found:
        raise UserError(f"{path} names no picture; tick some on the page and save the list again")
    return found


def as_list(pictures: Any) -> tuple[list[Any] | Any, bool]:
    """One picture or many → something to iterate over, and whether it was one."""
    if isinstance(pictures, str | bytes | Path | Image.Image):
        return [pictures], True
    if isinstance(pictures, np.ndarray | Tensor):
        shape = tuple(pictures.shape)
        if len(shape) == 4:
            return list(pictures), False
        if len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4)):
            return [pictures], True
        raise UserError(
            f"an array of shape {shape} is neither one picture, (height, width[, 3 or 4]), nor many, (number, height,"
            " width, 3); where channels come first, give array.transpose(1, 2, 0)"
        )
    if not isinstance(pictures, Iterable):
        as_picture(pictures)  # raises, and names what would be a picture
    return pictures, False


def expand(pictures: Sequence[str | Path]) -> list[Path]:
    """Files as they are, folders as the pictures below them."""
    found: list[Path] = []
    for picture in map(Path, pictures):
        inside = [picture]
        with suppress(OSError):  # a name that no file system takes is reported as a picture that cannot be read
            inside = list_files(picture) if picture.is_dir() else inside
        if not inside:
            raise no_pictures(picture)
        found += inside
    return found


def check_layout(root: Path, subfolders: bool = False) -> None:
    """Refuse a folder whose folders do not look like classes, and say what was probably meant.

    With `subfolders`, a class folder may hold folders of pictures and no picture itself.
    """
    here = quoted(root)
    if not root.is_dir():
        raise UserError(f"{here} is not a folder; name one that holds a folder of pictures for each class")
    folders = list_folders(root)
    if model := next((folder for folder in (root, *folders) if (folder / MODEL).is_file()), None):
        raise UserError(f"{quoted(model)} is a model, not pictures; keep it outside of the folders of pictures")
    if not folders and _holds_pictures(root):
        raise UserError(
            f"{here} holds pictures but no folders; put the pictures of each class into a folder named after it. If"
            f" '{root.resolve().name}' is the class, name the folder above it: {quoted(root.resolve().parent)}"
        )
    if folders and all(folder.name.lower() in (*TRAIN, *TEST) for folder in folders):
        names = _some([quoted(folder) for folder in folders])
        raise UserError(f"the folders in {here} are parts of a dataset, not classes; name one of them: {names}")
    without = [] if subfolders else [folder for folder in folders if not _holds_pictures(folder)]
    nested = {folder: inside for folder in without if (inside := list(filter(list_files, list_folders(folder))))}
    if nested:
        first, inside = next(iter(nested.items()))
        raise UserError(
            f"{quoted(first)} holds folders of pictures ({_some([folder.name for folder in inside])}) and no picture"
            f" itself; if these are the classes, name {_some([quoted(folder) for folder in nested])}; if all of them"
            f" are '{first.name}', say so with --subfolders (subfolders=True)"
        )


def check_swapped(model: Path, folder: Path, command: str) -> None:
    """Refuse MODEL and FOLDER in the wrong order; `command` is the words before them."""
    if (model / MODEL).exists():
        return
    meant = f"did you mean: {command} {quoted(folder)} {quoted(model)}?"
    if (folder / MODEL).is_file():
        raise UserError(f"{quoted(folder)} is a model and {quoted(model)} is not; {meant}")
    if not folder.exists() and model.is_dir() and any(map(_holds_pictures, list_folders(model))):
        raise UserError(f"{quoted(model)} holds folders of pictures, not a model; {meant}")


def skipped_files(root: Path) -> list[Path]:
    """Files below `root` that are not learnt: not pictures by their ending, or pictures outside the class folders."""
    if find_fixes(root) is not None:
        return []
    found = [path for path in walk(root) if path.parent == root or path.suffix.lower() not in SUFFIXES]
    return sorted(found, key=lambda path: (path.parent != root, path.as_posix()))


def describe_skipped(files: list[Path]) -> str:
    """`3 .heic (pip install 'clipcil[heic]' to read them), 1 .mp4, 2 pictures in no class folder`."""
    loose = ("picture in no class folder", "pictures in no class folder")
    bare = ("file without an ending", "files without an ending")
    endings = [path.suffix.lower() for path in files]
    kinds = Counter(loose if ending in SUFFIXES else (ending, ending) if ending else bare for ending in endings)
    hint = {(kind, kind): " (pip install 'clipcil[heic]' to read them)" for kind in HEIC}
    return ", ".join(counted(kinds[kind], *kind) + hint.get(kind, "") for kind in sorted(kinds))


def _holds_pictures(folder: Path) -> bool:
    """Whether a picture lies in a folder itself."""
    files = takewhile(lambda path: path.parent == folder, walk(folder))  # its own files come first
    return any(path.suffix.lower() in SUFFIXES for path in files)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown}, … ({len(names)} in all)"

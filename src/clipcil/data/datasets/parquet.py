"""`parquet`: any folder of parquet files with a picture column and a label column."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from clipcil.data.dataset import Dataset, register
from clipcil.data.datasets.folder import FolderOptions
from clipcil.data.names import clean_name
from clipcil.data.parquet import ParquetTable, read_parquet
from clipcil.data.pictures import PictureSet
from clipcil.data.sources import list_files
from clipcil.data.tasks import split_by_class
from clipcil.errors import UserError
from clipcil.settings import options
from clipcil.storage import read_text

TRAIN, TEST = ("train",), ("test", "validation", "valid", "val")


@options
class ParquetOptions(FolderOptions):
    image: str | None = None
    """Column with the pictures; None: found by its type."""
    label: str | None = None
    """Column with the classes, as numbers or names; None: found by its name or type."""
    names: Path | None = None
    """Text file with one class name per line, for labels that are numbers."""


@register("parquet", "any parquet files with pictures and labels", "a folder of *.parquet, or one file", ParquetOptions)
def open_parquet(root: Path | None, options: ParquetOptions) -> Dataset:
    if root is None:
        raise UserError("dataset parquet: name the folder that holds the parquet files with --data-root")
    files = [root] if root.is_file() or not root.is_dir() else list_files(root, (".parquet",))
    if not files:
        raise UserError(f"dataset parquet: there are no *.parquet files in {root}; name their folder with --data-root")
    return from_files(root.stem, root if root.is_dir() else root.parent, files, options)


def from_files(name: str, root: Path, files: Sequence[Path], options: ParquetOptions) -> Dataset:
    """Train and test parts by the names of files or folders (train-00000-of-00001.parquet, data/test/0.parquet), by a
    column `split`, or else by seed."""
    train, test = (_part(root, files, words) for words in (TRAIN, TEST))
    if train and test:
        tables = [_read(name, part, options) for part in (train, test)]
        names = _same_names(tables, options, files[0])
        learn, check = (_relabel(table, names) for table in tables)
        return Dataset(name, names, learn, check, (options.template,))
    table = _read(name, files, options)
    names = _same_names([table], options, files[0])
    pictures = _relabel(table, names)
    parts = [(value or "").lower() for value in table.splits]
    if any(part in TEST for part in parts) and any(part in TRAIN for part in parts):
        is_train, is_test = (torch.tensor([part in words for part in parts]) for words in (TRAIN, TEST))
    else:
        # Rows have no names; their places are what they are known by.
        is_test = split_by_class(
            [str(row) for row in range(len(pictures))], pictures.labels, options.test_share, options.split_seed
        )
        is_train = ~is_test
    return Dataset(name, names, pictures.subset(is_train), pictures.subset(is_test), (options.template,))


def _part(root: Path, files: Sequence[Path], words: Sequence[str]) -> list[Path]:
    """The files of the first of `words` that any file or folder name begins with."""

    def belongs(path: Path, word: str) -> bool:
        steps = path.relative_to(root).parts if path.is_relative_to(root) else path.parts
        return any(re.split(r"[-._]", step.lower().removeprefix("split="))[0] == word for step in steps)

    return next((found for word in words if (found := [path for path in files if belongs(path, word)])), [])


def _read(name: str, files: Sequence[Path], options: ParquetOptions) -> ParquetTable:
    return read_parquet(files, image=options.image, label=options.label, name=name)


def _same_names(tables: Sequence[ParquetTable], options: ParquetOptions, file: Path) -> list[str]:
    """The class names of all parts together. Parts whose labels are text may each miss some classes."""
    if options.names is not None:
        # A blank line between names is a class without one, which is refused: left out, it would shift all after it.
        names = [clean_name(line) for line in read_text(options.names, links=True).rstrip().splitlines()]
        top = max((int(table.pictures.labels.max()) for table in tables if len(table.pictures)), default=-1)
        if top >= len(names):
            raise UserError(f"{options.names} has {len(names)} names, but there is a label {top}")
        return names
    names = tables[0].names or []
    for table in tables:
        if table.names is None:
            raise UserError(
                f"{file} numbers its classes without naming them; give the data option names=FILE, one name per line"
            )
        if table.names != names and not table.text_labels:
            raise UserError(
                f"the parts of {file.parent} name their classes differently; give the data option names=FILE"
            )
        names = names if table.names == names else sorted({*names, *table.names})
    return names


def _relabel(table: ParquetTable, names: list[str]) -> PictureSet:
    if not table.text_labels or table.names is None or table.names == names:
        return table.pictures
    place = torch.tensor([names.index(name) for name in table.names], dtype=torch.int64)
    return table.pictures.subset(torch.arange(len(table.pictures)), place[table.pictures.labels])

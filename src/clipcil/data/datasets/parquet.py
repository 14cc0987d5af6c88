"""`parquet`: any folder of parquet files with a picture and a label column. `hub`: those of the Hugging Face hub."""

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
from clipcil.errors import UserError, first_line
from clipcil.network import downloads_allowed
from clipcil.settings import options
from clipcil.storage import read_text

TRAIN, TEST = ("train",), ("test", "validation", "valid", "val")
CONVERTED = "refs/convert/parquet"
"""The branch where the hub keeps the parquet form of datasets that come in another one."""


@options
class ParquetOptions(FolderOptions):
    image: str | None = None
    """Column with the pictures; None: found by its type."""
    label: str | None = None
    """Column with the classes, as numbers or names; None: found by its name or type."""
    names: Path | None = None
    """Text file with one class name per line, for labels that are numbers."""


@options
class HubOptions(ParquetOptions):
    repo: str = ""
    """The dataset, owner/name."""
    config: str = ""
    """The configuration (subset), for a dataset that has several."""
    revision: str | None = None
    """Branch, tag or commit; None: main, then the hub's own conversion to parquet."""


@register("parquet", "any parquet files with pictures and labels", "a folder of *.parquet, or one file", ParquetOptions)
def open_parquet(root: Path | None, options: ParquetOptions) -> Dataset:
    if root is None:
        raise UserError("dataset parquet: name the folder that holds the parquet files with --data-root")
    files = list_files(root, (".parquet",)) if root.is_dir() else [root]
    if not files:
        raise UserError(f"dataset parquet: there are no *.parquet files in {root}; name their folder with --data-root")
    return from_files(root.stem, root if root.is_dir() else root.parent, files, options)


@register("hub", "any image dataset of the Hugging Face hub", "the data option repo=owner/name", HubOptions)
def open_hub(root: Path | None, options: HubOptions) -> Dataset:
    """`root`, where given, is the folder that the files are kept in; else it is the hub's own cache."""
    if options.repo.count("/") != 1 or not all(options.repo.split("/")):
        raise UserError(f"dataset hub: the data option repo is '{options.repo}'; write repo=owner/name")
    for revision in [options.revision] if options.revision else [None, CONVERTED]:
        folder = _download(options.repo, revision, root)
        places = {path: path.relative_to(folder).parts for path in list_files(folder, (".parquet",))}
        files = [path for path, parts in places.items() if not options.config or options.config in parts]
        if files:
            # Configurations are top folders with the same parts; reading two as one would count pictures twice.
            tops = {places[path][0] for path in files if len(places[path]) > 1}
            configs = sorted(top for top in tops if top.lower() not in (*TRAIN, *TEST, "data"))
            if not options.config and len(configs) > 1:
                raise UserError(
                    f"hub dataset '{options.repo}' has configurations {', '.join(configs)}; choose one with config=NAME"
                )
            return from_files(options.repo, folder, files, options)
    wanted = f" of configuration '{options.config}'" if options.config else ""
    raise UserError(f"hub dataset '{options.repo}' has no parquet files{wanted}; download it and use --data folder")


def _download(repo: str, revision: str | None, root: Path | None) -> Path:
    """The folder of its parquet files. Offline mode (HF_HUB_OFFLINE=1) answers from the library's cache alone."""
    from huggingface_hub import snapshot_download

    local = not downloads_allowed()
    try:
        found = snapshot_download(
            repo,
            repo_type="dataset",
            revision=revision,
            allow_patterns=["*.parquet"],
            local_dir=root,
            local_files_only=local,
        )
    except Exception as error:  # gated, misspelt, offline: the library has a class for each
        what = f"cannot get dataset '{repo}' from the hub ({first_line(error)})"
        if local:
            what = f"dataset '{repo}' is not on this machine, and none is downloaded because a folder names it"
        advice = "allow it with --allow-download" if local else "download its files by hand and use --data parquet"
        raise UserError(f"{what}; {advice}") from error
    return Path(found)


def from_files(name: str, root: Path, files: Sequence[Path], options: ParquetOptions) -> Dataset:
    """Train and test parts by the names of files or folders (train-00000-of-00001.parquet, data/test/0.parquet), by a
    column `split`, or else by seed."""
    train, test = (_part(root, files, words) for words in (TRAIN, TEST))
    parts = [train, test] if train and test else [files]
    tables = [read_parquet(part, image=options.image, label=options.label, name=name) for part in parts]
    names = _common_names(tables, options.names, files[0])
    sets = [_relabel(table, names) for table in tables]
    if len(sets) == 1:
        said = [(value or "").lower() for value in tables[0].splits]
        is_train, is_test = (torch.tensor([value in words for value in said]) for words in (TRAIN, TEST))
        if not (bool(is_train.any()) and bool(is_test.any())):
            rows = [str(row) for row in range(len(sets[0]))]  # the places stand for names, which there are none of
            is_test = split_by_class(rows, sets[0].labels, options.test_share, options.split_seed)
            is_train = ~is_test
        sets = [sets[0].subset(is_train), sets[0].subset(is_test)]
    train_set, test_set = sets
    return Dataset(name, names, train_set, test_set, (options.template,))


def _part(root: Path, files: Sequence[Path], words: Sequence[str]) -> list[Path]:
    """The files of the first of `words` that any file or folder name begins with."""

    def belongs(path: Path, word: str) -> bool:
        steps = path.relative_to(root).parts
        return any(re.split(r"[-._]", step.lower().removeprefix("split="))[0] == word for step in steps)

    return next((found for word in words if (found := [path for path in files if belongs(path, word)])), [])


def _common_names(tables: Sequence[ParquetTable], file: Path | None, first: Path) -> list[str]:
    """The class names of all parts together. Parts whose labels are text may each miss some classes."""
    if file is not None:
        # A blank line between names is a class without one, which is refused: left out, it would shift all after it.
        names = [clean_name(line) for line in read_text(file, links=True).rstrip().splitlines()]
        top = max((int(table.pictures.labels.max()) for table in tables if len(table.pictures)), default=-1)
        if top >= len(names):
            raise UserError(f"{file} has {len(names)} names, but there is a label {top}")
        return names
    lists = [table.names for table in tables if table.names is not None]
    if len(lists) < len(tables):
        raise UserError(f"{first} numbers its classes without naming them; give the data option names=FILE")
    if all(table.text_labels for table in tables):
        return sorted({name for names in lists for name in names})
    if lists[0] != lists[-1]:
        raise UserError(f"the parts of {first.parent} name their classes differently; give the data option names=FILE")
    return lists[0]


def _relabel(table: ParquetTable, names: list[str]) -> PictureSet:
    if not table.text_labels or table.names is None or table.names == names:
        return table.pictures
    place = torch.tensor([names.index(name) for name in table.names], dtype=torch.int64)
    return table.pictures.subset(torch.arange(len(table.pictures)), place[table.pictures.labels])

"""Parquet files in Hugging Face's layout: a picture column {bytes, path}, a label column, class names in the metadata.

Dataset `parquet` is any folder of them; `hub` downloads them from the Hugging Face hub.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from clipcil.data.dataset import Dataset, register
from clipcil.data.datasets.folder import FolderOptions
from clipcil.data.names import clean_name
from clipcil.data.pictures import LazyPictures, PictureSet
from clipcil.data.sources import list_files
from clipcil.data.tasks import split_by_class
from clipcil.errors import UserError, first_line
from clipcil.network import downloads_allowed
from clipcil.settings import options
from clipcil.storage import open_regular, read_text, sha256

ROWS_AT_ONCE = 64
"""Rows read at a time. Arrow cannot read more than 2 GiB of {bytes, path} in one piece."""
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
def open_parquet_files(root: Path | None, options: ParquetOptions) -> Dataset:
    if root is None:
        raise UserError("dataset parquet: name the folder that holds the parquet files with --data-root")
    files = list_files(root, (".parquet",)) if root.is_dir() else [root]
    if not files:
        raise UserError(f"dataset parquet: there are no *.parquet files in {root}; name their folder with --data-root")
    return _from_files(root.stem, root if root.is_dir() else root.parent, files, options)


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
            return _from_files(options.repo, folder, files, options)
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
        return Path(found)
    except Exception as error:  # gated, misspelt, offline: the library has a class for each
        what = f"cannot get dataset '{repo}' from the hub ({first_line(error)})"
        if local:
            what = f"dataset '{repo}' is not on this machine, and none is downloaded because a folder names it"
        advice = "allow it with --allow-download" if local else "download its files by hand and use --data parquet"
        raise UserError(f"{what}; {advice}") from error


def _from_files(name: str, root: Path, files: Sequence[Path], options: ParquetOptions) -> Dataset:
    """Train and test parts by the names of files or folders (train-00000-of-00001.parquet, data/test/0.parquet), by a
    column `split`, or else by seed."""
    train, test = (_part(root, files, words) for words in (TRAIN, TEST))
    parts = [train, test] if train and test else [files]
    tables = [read_parquet(part, image=options.image, label=options.label, name=name) for part in parts]
    names = _class_names(tables, options.names, files[0])
    if len(tables) == 2:
        train_set, test_set = (table.picture_set(names) for table in tables)
    else:
        whole = tables[0].picture_set(names)
        said = [(value or "").lower() for value in tables[0].splits]
        is_train, is_test = (torch.tensor([value in words for value in said]) for words in (TRAIN, TEST))
        if not (bool(is_train.any()) and bool(is_test.any())):
            rows = [str(row) for row in range(len(whole))]  # pictures in a table have places instead of names
            is_test = split_by_class(rows, whole.labels, options.test_share, options.split_seed)
            is_train = ~is_test
        train_set, test_set = whole.subset(is_train), whole.subset(is_test)
    return Dataset(name, names, train_set, test_set, (options.template,))


def _part(root: Path, files: Sequence[Path], words: Sequence[str]) -> list[Path]:
    """The files of the first of `words` that any file or folder name begins with."""

    def belongs(path: Path, word: str) -> bool:
        steps = path.relative_to(root).parts
        return any(re.split(r"[-._]", step.lower().removeprefix("split="))[0] == word for step in steps)

    return next((found for word in words if (found := [path for path in files if belongs(path, word)])), [])


@dataclass(frozen=True)
class ParquetTable:
    """Parquet files read as one table of pictures."""

    name: str
    pictures: LazyPictures
    identity: str
    labels: list[int] | list[str]
    """Class of each picture, by number or by name."""
    names: list[str] | None
    """Class names: those of the file's metadata, or all text labels sorted."""
    splits: list[str | None]
    """The column `split`, where there is one of text; else empty."""

    def picture_set(self, names: list[str]) -> PictureSet:
        """The pictures with the places of their classes in `names` as labels."""
        place = {name: index for index, name in enumerate(names)}
        if unknown := [label for label in self.labels if isinstance(label, str) and label not in place]:
            raise UserError(f"{self.name}: label '{unknown[0]}' is not among the class names; add it to names=FILE")
        labels = [place[label] if isinstance(label, str) else label for label in self.labels]
        return PictureSet(self.name, self.pictures, torch.tensor(labels, dtype=torch.int64), self.identity)


def _class_names(tables: Sequence[ParquetTable], file: Path | None, first: Path) -> list[str]:
    """The class names of all parts together. Parts whose labels are text may each miss some classes."""
    if file is not None:
        # A blank line between names is a class without one, which is refused: left out, it would shift all after it.
        return [clean_name(line) for line in read_text(file, links=True).rstrip().splitlines()]
    lists = [table.names for table in tables if table.names is not None]
    if len(lists) < len(tables):
        raise UserError(f"{first} numbers its classes without naming them; give the data option names=FILE")
    if all(isinstance(label, str) for table in tables for label in table.labels):
        return sorted({name for names in lists for name in names})
    if lists[0] != lists[-1]:
        raise UserError(f"the parts of {first.parent} name their classes differently; give the data option names=FILE")
    return lists[0]


def read_parquet(
    files: Sequence[Path], *, image: str | None = None, label: str | None = None, name: str = "parquet"
) -> ParquetTable:
    """Read pictures and labels; the columns are found by type where they are not named."""
    try:
        # Not memory-mapped: a file taken away in mid-run must not take the process with it.
        # Chunks stay as they are: one array of bytes could not be longer than 2 GiB.
        table = pa.concat_tables([_read(file) for file in files])
    except pa.ArrowException as error:
        raise UserError(f"{files[0]} and the files beside it have different columns ({first_line(error)})") from error
    features = _hub_features(table.schema.metadata)
    pictures = [field.name for field in table.schema if holds_pictures(field.type)]
    image = _pick(image, files[0], "image", pictures, table.column_names)
    label = _pick(label, files[0], "label", _label_columns(table, features), table.column_names)
    column, classes = table[image], table[label]
    if not holds_pictures(column.type):
        raise UserError(f"{files[0]}: column '{image}' holds {str(column.type)[:80]}, not pictures")
    if classes.null_count:
        raise UserError(f"{files[0]}: column '{label}' has {classes.null_count} empty labels")
    if not (_is_text(classes.type) or pa.types.is_integer(classes.type)):
        raise UserError(f"{files[0]}: column '{label}' holds {classes.type}, not labels (whole numbers or names)")
    if pa.types.is_struct(column.type):
        kind = column.type.field("bytes").type
        column = pa.chunked_array([chunk.field("bytes") for chunk in column.chunks], type=kind)
    labels, names = classes.to_pylist(), features.get(label, {}).get("names")
    if _is_text(classes.type):
        labels = [clean_name(value) for value in labels]
        names = sorted(set(labels))
    return ParquetTable(
        name=name,
        pictures=LazyPictures(len(column), lambda place: column[place].as_py() or b""),
        identity=hashlib.sha256(b"".join(bytes.fromhex(sha256(path)) for path in files)).hexdigest()[:24],
        labels=labels,
        names=None if names is None else [clean_name(each) for each in names],
        splits=table["split"].to_pylist() if "split" in table.column_names and _is_text(table["split"].type) else [],
    )


def _read(file: Path) -> Any:
    with open_parquet(file) as reader:
        return pa.Table.from_batches(list(reader.iter_batches(ROWS_AT_ONCE)), reader.schema_arrow)


@contextmanager
def open_parquet(file: Path) -> Iterator[Any]:
    """Open a parquet file as a `pyarrow.parquet.ParquetFile`; a damaged file is a `UserError`."""
    try:
        # ParquetFile, because read_table would take a folder such as split=train/ for a column.
        with open_regular(file, links=True) as raw, pq.ParquetFile(raw) as reader:
            yield reader
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not a parquet file that can be read ({first_line(error)})") from error


def _hub_features(metadata: dict[bytes, bytes] | None) -> dict[str, dict[str, Any]]:
    """The types of the columns as Hugging Face writes them; empty in files of other programs."""
    try:
        features = json.loads((metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features") or {}
        return {key: value for key, value in features.items() if isinstance(value, dict)}
    except (ValueError, AttributeError):  # another program's entry of this name
        return {}


def holds_pictures(kind: Any) -> bool:
    """Whether a column of this Arrow type can hold encoded pictures: bytes, or Hugging Face's {bytes, path}."""
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _label_columns(table: Any, features: dict[str, dict[str, Any]]) -> list[str]:
    named = [key for key in table.column_names if features.get(key, {}).get("_type") == "ClassLabel"]
    if "fine_label" in named:  # CIFAR-100 has coarse labels too
        return ["fine_label"]
    usual = [key for key in ("label", "fine_label", "labels", "class") if key in table.column_names]
    whole = [field.name for field in table.schema if pa.types.is_integer(field.type)]
    return named or usual[:1] or whole


def _pick(given: str | None, file: Path, what: str, found: list[str], columns: list[str]) -> str:
    if given is not None:
        found = [given] if given in columns else []
    if len(found) != 1:
        some = f"{len(found)} columns that could be" if found else "no such column for"
        raise UserError(
            f"{file} has {some} the {what}; name one with the data option {what}=NAME (columns: {', '.join(columns)})"
        )
    return found[0]


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):  # what pandas calls a category
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))

"""Datasets in Hugging Face's parquet layout: a picture column {bytes, path}, a label column, names in the metadata."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from clipcil.data.names import clean_name
from clipcil.data.pictures import LazyPictures, PictureSet
from clipcil.errors import UserError, first_line
from clipcil.storage import open_regular, sha256

ROWS = 64
"""Rows read at a time. Arrow cannot read more than 2 GiB of {bytes, path} in one piece."""


@dataclass(frozen=True)
class ParquetTable:
    """Parquet files read as one table of pictures."""

    pictures: PictureSet
    names: list[str] | None
    """Class names by label, where the file's metadata or a text label column has them."""
    splits: list[str | None]
    """The column `split`, where there is one of text; else empty. No other column is looked at."""
    text_labels: bool
    """Whether the label column holds names, of which the labels are the places in sorted order."""


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
    column = table[image]
    if not holds_pictures(column.type):
        raise UserError(f"{files[0]}: column '{image}' holds {str(column.type)[:80]}, not pictures")
    if pa.types.is_struct(column.type):
        kind = column.type.field("bytes").type
        column = pa.chunked_array([chunk.field("bytes") for chunk in column.chunks], type=kind)
    try:
        labels, names = _labels(table[label], features.get(label, {}).get("names"))
        splits = table["split"].to_pylist() if "split" in table.column_names and _is_text(table["split"].type) else []
    except ValueError as error:
        raise UserError(f"{files[0]}: column '{label}' {error}") from error
    identity = hashlib.sha256(b"".join(bytes.fromhex(sha256(path)) for path in files)).hexdigest()[:24]
    encoded = LazyPictures(len(column), lambda place: column[place].as_py() or b"")
    text = not pa.types.is_integer(table[label].type)
    return ParquetTable(PictureSet(name, encoded, labels, identity), names, splits, text)


def _read(file: Path) -> Any:
    with open_parquet(file) as reader:
        return pa.Table.from_batches(list(reader.iter_batches(ROWS)), reader.schema_arrow)


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
    if pa.types.is_struct(kind):
        inside = [field.type for field in kind if field.name == "bytes"]
        return len(inside) == 1 and not pa.types.is_struct(inside[0]) and holds_pictures(inside[0])
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


def _labels(column: Any, names: list[str] | None) -> tuple[torch.Tensor, list[str] | None]:
    """Labels (N,) and class names; a `ValueError` says what the column holds instead."""
    if column.null_count:
        raise ValueError(f"has {column.null_count} empty labels")
    if _is_text(column.type):
        values = [clean_name(value) for value in column.to_pylist()]
        names = sorted(set(values))
        place = {name: index for index, name in enumerate(names)}
        return torch.tensor([place[value] for value in values], dtype=torch.int64), names
    if not pa.types.is_integer(column.type):
        raise ValueError(f"holds {column.type}, not labels (whole numbers or names)")
    labels = torch.from_numpy(np.asarray(column.to_numpy(), dtype=np.int64).copy())
    low, top = (int(labels.min()), int(labels.max())) if len(labels) else (0, -1)
    if low < 0:
        raise ValueError(f"has the label {low}; these pictures have no labels to learn or test by")
    if names is not None and top >= len(names):
        raise ValueError(f"has the label {top}, outside the {len(names)} named classes")
    return labels, [clean_name(name) for name in names] if names is not None else None

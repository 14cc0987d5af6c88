"""Datasets in Hugging Face's parquet layout: a picture column {bytes, path}, a label column, names in the metadata."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch

from clipcil.data.names import clean_name
from clipcil.data.pictures import PictureSet
from clipcil.errors import UserError, first_line
from clipcil.storage import open_regular, parse_json, sha256

ROWS = 64
"""Rows read at a time. Arrow cannot read more than 2 GiB of {bytes, path} in one piece."""


class ArrowPictures(Sequence[bytes]):
    """The encoded pictures of an Arrow column, taken out one at a time."""

    def __init__(self, column: Any) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        value = self.column[index].as_py()
        return value if isinstance(value, bytes) else b""


@dataclass(frozen=True)
class ParquetTable:
    """Parquet files read as one table of pictures."""

    pictures: PictureSet
    names: list[str] | None
    """Class names by label, where the file's metadata or a text label column has them."""
    splits: list[str | None]
    """The column `split`, where there is one of text; else empty. No other column is looked at."""
    text_labels: bool = False
    """Whether the label column holds names, of which the labels are the places in sorted order."""


def read_parquet(
    files: Sequence[Path], *, image: str | None = None, label: str | None = None, name: str = "parquet"
) -> ParquetTable:
    """Read pictures and labels; the columns are found by type where they are not named."""
    import pyarrow as pa

    if not files:
        raise UserError(f"{name}: no parquet files were found")
    try:
        # Not memory-mapped: a file taken away in mid-run must not take the process with it.
        # Chunks stay as they are: one array of bytes could not be longer than 2 GiB.
        tables = [_read(file) for file in files]
        table = pa.concat_tables(tables) if len(tables) > 1 else tables[0]
    except pa.ArrowException as error:
        raise UserError(f"{files[0]} and the files beside it have different columns ({first_line(error)})") from error
    features = _hub_features(table.schema.metadata)
    image = _pick(image, files[0], "image", _picture_columns(table), table.column_names)
    label = _pick(label, files[0], "label", _label_columns(table, features), table.column_names)
    column = table[image]
    if not holds_pictures(column.type):
        raise UserError(f"{files[0]}: column '{image}' holds {str(column.type)[:80]}, not pictures")
    if pa.types.is_struct(column.type):
        kind = column.type.field("bytes").type
        column = pa.chunked_array([chunk.field("bytes") for chunk in column.chunks], type=kind)
    labels, names = _labels(table[label], features.get(label, {}).get("names"), files[0], label)
    pictures = PictureSet(name, ArrowPictures(column), labels, identity_of_tables(files))
    told = table.column_names.count("split") == 1 and _is_text(table["split"].type)
    splits = _texts(table["split"], files[0], "split") if told else []
    text = not pa.types.is_integer(table[label].type)
    return ParquetTable(pictures, names, splits, text)


def _read(file: Path) -> Any:
    import pyarrow as pa

    with open_parquet(file) as reader:
        return pa.Table.from_batches(list(reader.iter_batches(ROWS)), reader.schema_arrow)


@contextmanager
def open_parquet(file: Path) -> Iterator[Any]:
    """Open a parquet file as a `pyarrow.parquet.ParquetFile`.

    Raises:
        UserError: The file is damaged, or in another format.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # ParquetFile, because read_table would take a folder such as split=train/ for a column.
        with open_regular(file, links=True) as raw, pq.ParquetFile(raw) as reader:
            yield reader
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not a parquet file that can be read ({first_line(error)})") from error


def identity_of_tables(files: Sequence[Path]) -> str:
    """Fingerprint of all bytes: files may agree in size and in the footer and still hold other pictures."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(bytes.fromhex(sha256(path)))
    return digest.hexdigest()[:24]


def _hub_features(metadata: dict[bytes, bytes] | None) -> dict[str, dict[str, Any]]:
    text = (metadata or {}).get(b"huggingface")
    if not text:
        return {}
    try:
        features = parse_json(text, "the metadata")["info"]["features"]
    except (UserError, KeyError, TypeError):
        return {}
    found = features if isinstance(features, dict) else {}
    return {key: value for key, value in found.items() if isinstance(value, dict)}


def holds_pictures(kind: Any) -> bool:
    """Whether a column of this Arrow type can hold encoded pictures: bytes, or Hugging Face's {bytes, path}."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        inside = [field.type for field in kind if field.name == "bytes"]
        return len(inside) == 1 and not pa.types.is_struct(inside[0]) and holds_pictures(inside[0])
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _picture_columns(table: Any) -> list[str]:
    return [field.name for field in table.schema if holds_pictures(field.type)]


def _label_columns(table: Any, features: dict[str, dict[str, Any]]) -> list[str]:
    import pyarrow as pa

    columns = set(table.column_names)  # the metadata may name others
    named = [key for key, value in features.items() if value.get("_type") == "ClassLabel" and key in columns]
    if "fine_label" in named:  # CIFAR-100 has coarse labels too
        return ["fine_label"]
    usual = [key for key in ("label", "fine_label", "labels", "class") if key in table.column_names]
    whole = [field.name for field in table.schema if pa.types.is_integer(field.type)]
    return named or usual[:1] or whole


def _pick(given: str | None, file: Path, what: str, found: list[str], columns: list[str]) -> str:
    if given is not None:
        if given not in columns:
            raise UserError(f"{file} has no column '{given}'; it has: {', '.join(columns)}")
        found = [given]
    if len(found) != 1:
        some = f"{len(found)} columns that could be ({', '.join(found)})" if found else "no column that could be"
        raise UserError(
            f"{file} has {some} the {what}; name it with the data option {what}=NAME (columns: {', '.join(columns)})"
        )
    if columns.count(found[0]) > 1:
        raise UserError(f"{file} has {columns.count(found[0])} columns called '{found[0]}'; rename all but one")
    return found[0]


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):  # what pandas calls a category
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _texts(column: Any, file: Path, key: str) -> list[str | None]:
    """The values of a column of text. Rows that refer to one value share it, so that a long one costs its length once.

    Raises:
        UserError: One of them is not UTF-8, which Arrow does not check.
    """
    import pyarrow as pa

    found: list[str | None] = []
    try:
        for chunk in column.chunks:
            if pa.types.is_dictionary(chunk.type):
                values = [*chunk.dictionary.to_pylist(), None]
                found += [values[-1 if place is None else place] for place in chunk.indices.to_pylist()]
            else:
                found += chunk.to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: column '{key}' holds text that is not UTF-8") from error
    return found


def _labels(column: Any, names: list[str] | None, file: Path, key: str) -> tuple[torch.Tensor, list[str] | None]:
    import pyarrow as pa

    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        names = None  # the metadata are not trusted
    if column.null_count:
        raise UserError(f"{file}: column '{key}' has {column.null_count} empty labels")
    if _is_text(column.type):
        values = _texts(column, file, key)
        said = {value: clean_name(value or "") for value in set(values)}
        names = sorted(set(said.values()))
        place = {name: index for index, name in enumerate(names)}
        return torch.tensor([place[said[value]] for value in values], dtype=torch.int64), names
    if not pa.types.is_integer(column.type):
        raise UserError(f"{file}: column '{key}' holds {column.type}, not labels (whole numbers or names)")
    labels = torch.from_numpy(np.asarray(column.to_numpy(), dtype=np.int64).copy())
    low, top = (int(labels.min()), int(labels.max())) if len(labels) else (0, -1)
    if low < 0:
        raise UserError(
            f"{file}: column '{key}' has the label {low}; these pictures have no labels to learn or test by"
        )
    if names is not None and top >= len(names):
        raise UserError(f"{file}: column '{key}' has the label {top}, outside the {len(names)} named classes")
    return labels, [clean_name(name) for name in names] if names is not None else None

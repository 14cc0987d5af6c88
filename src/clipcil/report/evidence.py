"""Evidence: many finished runs in two parquet files, `runs.parquet` and `predictions.parquet`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from clipcil.errors import UserError

RUNS, PREDICTIONS = "runs.parquet", "predictions.parquet"
AS_JSON = ("per_class", "drift", "config", "timing")
"""Columns of `runs.parquet` that hold JSON."""


def find_evidence(place: Path) -> tuple[Path, str] | None:
    """The folder of evidence that `place` names, and the part of the ids behind it.

    Args:
        place: A folder with `runs.parquet`, or such a folder followed by the beginning of ids, such as
            `reproduce/evidence/flowers`.

    Returns:
        None where `place` names no evidence.
    """
    if (place / RUNS).is_file():
        return place, ""
    if place.exists():
        return None
    folder = next((folder for folder in place.parents if (folder / RUNS).is_file()), None)
    return None if folder is None else (folder, place.relative_to(folder).as_posix())


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of `runs.parquet`: the fields of a `RunRecord`, with `id`."""
    rows = _read(folder / RUNS).to_pylist()
    return [{**row, **{key: json.loads(row[key]) for key in AS_JSON if row[key] is not None}} for row in rows]


def read_answers(folder: Path, run: str) -> Iterator[tuple[int, int, str, str]]:
    """Task, row, true class and predicted class of each test picture of one run; none where they were not kept."""
    table, places = _predictions(folder / PREDICTIONS)
    start, count = places.get(run, (0, 0))
    own = table.slice(start, count)
    for task, row, true, guess in zip(
        *(own[name].to_pylist() for name in ("task", "row", "true", "guess")), strict=True
    ):
        yield task, row, true, true if guess is None else guess


@lru_cache(maxsize=2)
def _predictions(path: Path) -> tuple[Any, dict[str, tuple[int, int]]]:
    """The table, and the first row and number of rows of each run, whose rows follow each other."""
    import numpy as np

    table = _read(path).combine_chunks().unify_dictionaries()
    runs = table["run"].combine_chunks()
    names, starts, counts = np.unique(runs.indices.to_numpy(), return_index=True, return_counts=True)
    known = runs.dictionary.to_pylist()
    return table, {known[name]: (int(start), int(n)) for name, start, n in zip(names, starts, counts, strict=True)}


def _read(path: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as evidence ({type(error).__name__})") from error

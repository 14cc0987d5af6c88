"""`python -m reproduce keep`: add finished runs to the evidence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from clipcil.errors import UserError
from clipcil.report.answers import TestAnswer, read_predictions
from clipcil.report.runs import AS_JSON, PREDICTIONS, RUNS, RunRecord, find_runs
from clipcil.storage import whole_file

EVIDENCE = Path(__file__).parent / "evidence"
NOTES = "NOTES.md"
NUMBERS = pyarrow.list_(pyarrow.float64())
RUN_COLUMNS = pyarrow.schema(
    [
        *((name, pyarrow.string()) for name in ("id", "method", "data", "order")),
        *((name, pyarrow.int64()) for name in ("tasks", "seed")),
        *((name, pyarrow.float64()) for name in ("last", "average", "last_weighted", "average_weighted")),
        *((name, pyarrow.float64()) for name in ("forgetting", "backward_transfer")),
        *((name, NUMBERS) for name in ("after", "after_weighted")),
        ("matrix", pyarrow.list_(NUMBERS)),
        ("sizes", pyarrow.list_(pyarrow.int32())),
        ("between_tasks", pyarrow.list_(pyarrow.list_(pyarrow.int32()))),
        ("notes", pyarrow.list_(pyarrow.string())),
        *((name, pyarrow.string()) for name in AS_JSON),
    ]
)
"""A row for each run: the fields of a `RunRecord`, with those first by which people look for a run."""
NAME = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
PREDICTION_COLUMNS = pyarrow.schema(
    [("run", NAME), ("task", pyarrow.int16()), ("row", pyarrow.int32()), ("true", NAME), ("guess", NAME)]
)
"""A row for each test picture of each run; `guess` is null where it is the true class."""
Predictions = Mapping[str, Sequence[TestAnswer]]


def keep(places: Sequence[Path], part: str, folder: Path = EVIDENCE) -> int:
    """Add the runs in these folders to the evidence, as `PART/NAME`; a run that is there is replaced.

    Args:
        places: Folders of runs, or folders that hold them.
        part: The part of the evidence, such as `claims`.
        folder: The evidence.

    Returns:
        The number of runs added.

    Raises:
        UserError: A run of the same id has other options or classes.
    """
    known = {_id(run, folder): run for run in find_runs([folder])} if (folder / RUNS).is_file() else {}
    new: dict[str, RunRecord] = {}
    for run in find_runs(places):
        name = f"{part}/{run.folder.resolve().name}"
        other = new.get(name) or known.get(name, run)
        if _identity(other) != _identity(run):
            raise UserError(f"{run.folder} is not the run that the evidence has as {name}; choose another --part")
        new[name] = run
    runs = {**known, **new}
    write(folder, runs, {name: _answers(run) for name, run in runs.items()})
    return len(new)


def _id(run: RunRecord, folder: Path) -> str:
    return run.folder.relative_to(folder).as_posix()


def _identity(run: RunRecord) -> tuple[Any, ...]:
    """Options and settings without the folder of the data, and the classes, which tell two folders apart."""
    return _config(run), sorted(run.per_class)


def _config(run: RunRecord) -> dict[str, Any]:
    return {**run.config, "run": {key: value for key, value in run.run.items() if key != "data_root"}}


def _answers(run: RunRecord) -> Sequence[TestAnswer]:
    try:
        return read_predictions(run.folder)
    except UserError:
        return ()


def write(folder: Path, runs: Mapping[str, RunRecord], predictions: Predictions) -> None:
    """Write both files anew: the same bytes for the same runs.

    Args:
        folder: The evidence.
        runs: Runs by id.
        predictions: Predictions by id, where they are known.
    """
    names = sorted(runs, key=lambda name: name.split("/"))
    table = pyarrow.Table.from_pylist([_row(name, runs[name]) for name in names], schema=RUN_COLUMNS)
    _write(table, folder / RUNS)
    parts = [_predictions(name, predictions.get(name, ())) for name in names]
    _write(pyarrow.concat_tables(parts).unify_dictionaries(), folder / PREDICTIONS)


def _row(name: str, run: RunRecord) -> dict[str, Any]:
    values = {**run.values, "config": _config(run), "timing": run.timing.model_dump(exclude_unset=True)}
    texts = {key: json.dumps(values[key], ensure_ascii=False) for key in AS_JSON if key in values}
    seen = {key: getattr(run, key) for key in ("method", "data", "order", "tasks", "seed")}
    return {"id": name, **seen, **values, **texts}


def _predictions(name: str, found: Iterable[TestAnswer]) -> pyarrow.Table:
    own = sorted(found, key=lambda each: (each.task, each.true, each.row))
    columns = {
        "run": [name] * len(own),
        "task": [each.task for each in own],
        "row": [each.row for each in own],
        "true": [each.true for each in own],
        "guess": [None if each.right else each.guess for each in own],
    }
    return pyarrow.Table.from_pydict(columns, schema=PREDICTION_COLUMNS)


def _write(table: pyarrow.Table, path: Path) -> None:
    with whole_file(path) as temporary:
        parquet.write_table(table, temporary, compression="zstd", compression_level=19, store_schema=True)

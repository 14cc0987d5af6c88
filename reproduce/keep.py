"""`python -m reproduce keep`: add finished runs to the evidence."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from clipcil.errors import UserError
from clipcil.report.answers import read_predictions
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
    kept = find_runs([folder]) if (folder / RUNS).is_file() else []
    known = {run.folder.relative_to(folder).as_posix(): run for run in kept}
    new: dict[str, RunRecord] = {}
    for run in find_runs(places):
        name = f"{part}/{run.folder.resolve().name}"
        other = new.get(name) or known.get(name, run)
        # The folder of the data is not kept; the classes tell two folders apart.
        if (_config(other), sorted(other.per_class)) != (_config(run), sorted(run.per_class)):
            raise UserError(f"{run.folder} is not the run that the evidence has as {name}; choose another --part")
        new[name] = run
    _write(folder, known | new)
    return len(new)


def _config(run: RunRecord) -> dict[str, Any]:
    return {**run.config, "run": {key: value for key, value in run.run.items() if key != "data_root"}}


def _write(folder: Path, runs: Mapping[str, RunRecord]) -> None:
    """Write both files anew: the same bytes for the same runs."""
    names = sorted(runs, key=lambda name: name.split("/"))
    predictions = pyarrow.concat_tables([_predictions(name, runs[name]) for name in names]).unify_dictionaries()
    rows = pyarrow.Table.from_pylist([_row(name, runs[name]) for name in names], schema=RUN_COLUMNS)
    for table, name in ((rows, RUNS), (predictions, PREDICTIONS)):
        with whole_file(folder / name) as temporary:
            parquet.write_table(table, temporary, compression="zstd", compression_level=19, store_schema=True)


def _row(name: str, run: RunRecord) -> dict[str, Any]:
    values = {**run.values, "config": _config(run), "timing": run.timing.model_dump(exclude_unset=True)}
    texts = {key: json.dumps(values[key], ensure_ascii=False) for key in AS_JSON if key in values}
    seen = {key: getattr(run, key) for key in ("method", "data", "order", "tasks", "seed")}
    return {"id": name, **seen, **values, **texts}


def _predictions(name: str, run: RunRecord) -> pyarrow.Table:
    """The predictions of a run; no row where they are missing."""
    try:
        found = sorted(read_predictions(run.folder), key=lambda each: (each.task, each.true, each.row))
    except UserError:
        found = []
    rows = [
        {"run": name, "task": task, "row": row, "true": true, "guess": None if guess == true else guess}
        for task, row, true, guess, _ in found
    ]
    return pyarrow.Table.from_pylist(rows, schema=PREDICTION_COLUMNS)

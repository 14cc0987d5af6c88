"""The schema of a run's results, and finished runs read back from run folders and from evidence.

Evidence is many finished runs in two parquet files, `runs.parquet` and `predictions.parquet`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from clipcil.data.names import ANYTHING
from clipcil.errors import UserError
from clipcil.plugins import need_extra
from clipcil.settings import Count, Text, flat, typed
from clipcil.storage import MissingFileError, read_json, walk

RUNS, PREDICTIONS = "runs.parquet", "predictions.parquet"
AS_JSON = ("per_class", "drift", "config", "timing")
"""Columns of `runs.parquet` that hold JSON."""
WHOLE = ("loading", "learning", "evaluation", "drift")
"""The phases that follow each other; the other phases lie inside `learning`."""

NUMBERS = ("last", "average", "last_weighted", "average_weighted", "forgetting", "backward_transfer")
"""The numbers of a run that tables show."""

Percent = Annotated[float, Field(ge=-100, le=100)]
Percents = Annotated[list[Percent | None], Field(min_length=1, max_length=10_000)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class _Choices(_Strict):
    """The options of a run that reports use; more are allowed."""

    method: Text
    data: Text
    backbone: Text
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)]
    data_root: Text | None = None
    data_options: dict[str, Any] = {}
    hold_out: Annotated[int, Field(ge=1, le=10**9)] | None = None


class _Config(_Strict):
    run: _Choices
    method: dict[str, Any]


class Timing(_Strict):
    """The contents of `timing.json`."""

    finished: Text = ""
    """The day the run ended, such as 2026-01-31; empty where unknown."""
    seconds: dict[str, Annotated[float, Field(ge=0, le=1e12)]] = {}
    """Seconds of each phase."""
    peak_megabytes: Any = None
    """One number; a table of phases in runs of version 0.1."""


class RunRecord(_Strict):
    """Results of a run: the contents of `results.json` and `timing.json`. Accuracies are in percent."""

    last: Percent
    """A_B: mean accuracy over the tasks after the last task."""
    average: Percent
    """Ā: mean of A_k over all tasks."""
    last_weighted: Percent
    average_weighted: Percent
    forgetting: Percent
    backward_transfer: Percent
    after: Annotated[list[Percent], Field(min_length=1, max_length=10_000)]
    """A_k after each task."""
    after_weighted: Percents | None = None
    matrix: list[Percents]
    """R[k][i]: accuracy on task i after task k; None where i > k."""
    per_class: dict[str, Percent | None] = {}
    """Accuracy of each class at the end, in the order in which classes were learnt."""
    sizes: Annotated[list[Annotated[int, Field(ge=1, le=10**6)]], Field(min_length=1, max_length=10_000)]
    """Number of classes of each task."""
    drift: list[dict[str, Annotated[float, Field(ge=-1e12, le=1e12)]] | None] = []
    """Distance of the stored class Gaussians from the features of old training pictures after each task."""
    between_tasks: list[list[Count]]
    """[i][j]: test pictures of task i that were predicted as a class of task j at the end."""
    notes: list[Text]
    config: dict[str, Any]
    """Every option (`run`) and setting (`method`), as in `config.toml`."""
    timing: Timing = Field(default=Timing(), exclude=True)
    """The contents of `timing.json`; empty where unknown."""
    folder: Path = Field(default=Path(), exclude=True)
    """Where the run is; in evidence the path of its table with the id of the run behind it."""

    @model_validator(mode="after")
    def _check(self) -> RunRecord:
        typed(self.config, _Config, "config")  # checked beside the table, so that no option is lost or moved
        tables: list[Any] = [self.after, self.matrix, *self.matrix, self.between_tasks, *self.between_tasks]
        if any(len(table) != self.tasks for table in [*tables, self.drift or self.sizes]):
            raise UserError(f"its tables are not all of {self.tasks} tasks")
        return self

    @property
    def values(self) -> dict[str, Any]:
        """The contents of `results.json`."""
        return self.model_dump(exclude_unset=True)

    @property
    def run(self) -> dict[str, Any]:
        """The options outside the method, such as `data` and `seed`."""
        return dict(self.config["run"])

    @property
    def settings(self) -> dict[str, Any]:
        """The method's own settings."""
        return dict(self.config["method"])

    @property
    def method(self) -> str:
        return str(self.config["run"]["method"])

    @property
    def data(self) -> str:
        return str(self.config["run"]["data"])

    @property
    def backbone(self) -> str:
        return str(self.config["run"]["backbone"])

    @property
    def seed(self) -> int:
        return int(self.config["run"]["seed"])

    @property
    def order(self) -> str:
        """The class order, such as `seed:1993`."""
        return str(self.config["run"].get("order", ""))

    @property
    def tasks(self) -> int:
        return len(self.sizes)

    @property
    def test_pictures(self) -> int:
        """Number of test pictures at the end."""
        return sum(map(sum, self.between_tasks))

    @property
    def seconds(self) -> float:
        """Seconds from loading to the last measurement."""
        return float(sum(self.timing.seconds.get(name, 0.0) for name in WHOLE))

    @cached_property
    def stream(self) -> tuple[str, int, str, str]:
        """Data, number of tasks, backbone, and all other options of the stream of tasks as JSON.

        Runs with equal streams can be compared. Runs that differ only in class order and seed are repetitions.
        """
        ignored = ["method", "data", "backbone", "tasks", "seed", "order", "device", "precision", "code"]
        ignored += [] if self.data in ANYTHING else ["data_root"]
        rest = {key: value for key, value in self.run.items() if key not in ignored}
        if self.data in ANYTHING and not self.run.get("data_root"):  # evidence, which has no folder of data
            names = sorted(self.per_class)
            rest["classes"] = f"{names[0]} to {names[-1]} ({len(names)})" if names else None
        return self.data, self.tasks, self.backbone, json.dumps(rest, sort_keys=True)

    @cached_property
    def key(self) -> str:
        """A text that is equal for runs that differ only in class order and seed."""
        run = [self.method, self.run.get("device"), self.run.get("precision"), self.run.get("code")]
        return json.dumps([self.stream, run, self.settings], sort_keys=True)


def read_run(folder: Path) -> RunRecord:
    """The finished run in `folder`; missing or damaged results are refused."""
    record: RunRecord | None = _read(folder / "results.json", RunRecord)
    if record is None:
        raise UserError(f"{folder} holds no finished run (there is no results.json)")
    return record.model_copy(update={"timing": _read(folder / "timing.json", Timing) or Timing(), "folder": folder})


def _read(path: Path, kind: type[Any]) -> Any:
    """The contents of a file of a run; None where it is missing."""
    try:
        return typed(read_json(path), kind)
    except MissingFileError:
        return None
    except UserError as error:
        reason = str(error).removeprefix(f"{path} ")
        raise UserError(f"{path} is not the {path.stem} of a run ({reason}); remove or redo it") from error


def find_runs(places: Iterable[Path]) -> list[RunRecord]:
    """Every finished run in or under these folders, each once, in the order of their paths.

    Args:
        places: Folders of runs, or folders that hold them. A folder with evidence (`runs.parquet`) is read like a
            folder of runs, and `EVIDENCE/PART` is the part of its runs whose ids begin with `PART/`.
    """
    found: dict[Path, RunRecord] = {}
    for place in places:
        if (evidence := find_evidence(place)) is not None:
            runs = read_evidence(*evidence)
        elif not place.is_dir():
            raise UserError(f"{place} is not a folder; name run folders, or the folder of a bench")
        else:
            below = (folder for folder, files in walk(place) if "results.json" in files)
            runs = [read_run(folder) for folder in ([place] if (place / "results.json").is_file() else sorted(below))]
        if not runs:
            raise UserError(f"{place} holds no finished run (there is no results.json in it or below)")
        for run in runs:
            found.setdefault(run.folder.resolve(), run)
    return list(found.values())


class RunTable(list[dict[str, Any]]):
    """A row for each finished run, the same keys in all."""

    def to_pandas(self) -> Any:
        """The rows as a pandas data frame; needs the extra `pandas`."""
        return need_extra("pandas").DataFrame(self)


def read_runs(*folders: str | Path) -> RunTable:
    """Finished runs as a table: a row for each, with its numbers, options and settings.

    A row has `folder`, the accuracies in percent (`last` is A_B, `average` is Ā, …), `seconds`, the day `finished`,
    every option of the run by its name (`method`, `data`, `seed`, `tasks`, …), and every setting of the method, such
    as `method.stage1.lr`.

    Args:
        folders: Folders of runs, folders that hold them, such as that of a bench, or evidence.

    Raises:
        UserError: A folder holds no finished run.

    Examples:
        >>> import clipcil, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     results = clipcil.Experiment("simplecil", tasks=5).run(f"{folder}/run")
        ...     table = clipcil.read_runs(folder)
        >>> [(row["method"], row["tasks"], row["last"] == round(results.last, 4)) for row in table]
        [('simplecil', 5, True)]
    """
    rows = []
    for run in find_runs(map(Path, folders)):
        numbers = {"tasks": run.tasks, **{key: getattr(run, key) for key in NUMBERS}}
        rest = {"seconds": run.seconds, "finished": run.timing.finished}
        settings = {f"method.{key}": value for key, value in flat(run.settings).items()}
        rows.append({"folder": str(run.folder), **run.run, **numbers, **rest, **settings})
    keys = dict.fromkeys(key for row in rows for key in row)
    return RunTable({key: row.get(key) for key in keys} for row in rows)


def find_evidence(place: Path) -> tuple[Path, str] | None:
    """The folder of evidence in `place`, such as `reproduce/evidence/flowers`, and the part of the ids behind it; None
    where it names no evidence."""
    if (place / RUNS).is_file():
        return place, ""
    if place.exists():
        return None
    folder = next((folder for folder in place.parents if (folder / RUNS).is_file()), None)
    return None if folder is None else (folder, place.relative_to(folder).as_posix())


def read_evidence(folder: Path, part: str = "") -> list[RunRecord]:
    """The runs of evidence whose ids begin with `PART/`, or all."""
    runs = []
    for row in read_parquet(folder / RUNS).to_pylist():
        if not part or f"{row['id']}/".startswith(f"{part}/"):
            values = {key: value for key, value in row.items() if key in RunRecord.model_fields and value is not None}
            values |= {key: json.loads(values[key]) for key in AS_JSON if key in values}
            try:
                record: RunRecord = typed(values, RunRecord)
            except UserError as error:
                raise UserError(f"{folder / RUNS} is not evidence ({row['id']}: {error})") from error
            runs.append(record.model_copy(update={"folder": folder / row["id"]}))
    return runs


def read_parquet(path: Path) -> Any:
    """The table in a parquet file of evidence."""
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as evidence ({type(error).__name__})") from error

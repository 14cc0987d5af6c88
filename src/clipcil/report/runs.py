"""The schema of a run's results, and finished runs read back from run folders and from evidence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from clipcil.data.names import ANYTHING
from clipcil.errors import UserError
from clipcil.report.evidence import find_evidence, read_rows
from clipcil.storage import MissingFileError, read_json

WHOLE = ("loading", "learning", "evaluation", "drift")
"""The phases that follow each other; the other phases lie inside `learning`."""

NUMBERS = ("last", "average", "last_weighted", "average_weighted", "forgetting", "backward_transfer")
"""The numbers of a run that tables show."""

Text = Annotated[str, Field(max_length=10_000)]
Count = Annotated[int, Field(ge=0, le=2**53)]
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


def _config(table: dict[str, Any]) -> dict[str, Any]:
    """Check the config and return the same object, so that no option is lost or moved."""
    _Config.model_validate(table)
    return table


class Timing(_Strict):
    """The contents of `timing.json`."""

    finished: Text = ""
    """The day the run ended, such as 2026-01-31."""
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
    config: Annotated[dict[str, Any], AfterValidator(_config)]
    """Every option (`run`) and setting (`method`), as in `config.toml`."""
    timing: dict[str, Any] = Field(default={}, exclude=True)
    """The contents of `timing.json`, as `Timing` has checked them; empty where unknown."""
    folder: Path = Field(default=Path(), exclude=True)
    """Where the run is; in evidence the path of its table with the id of the run behind it."""

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

    @cached_property
    def test_pictures(self) -> int:
        """Number of test pictures at the end."""
        return sum(sum(row) for row in self.between_tasks)

    @property
    def finished(self) -> str:
        """The day the run ended, such as 2026-01-31; empty where unknown."""
        return str(self.timing.get("finished", ""))[:10]

    @cached_property
    def seconds(self) -> float:
        """Seconds from loading to the last measurement."""
        phases = self.timing.get("seconds", {})
        return float(sum(phases.get(name, 0.0) for name in WHOLE))

    @cached_property
    def stream(self) -> tuple[str, int, str, str]:
        """Data, number of tasks, backbone, and all other options of the stream of tasks as JSON.

        Runs with equal streams can be compared. Class order and seed are no part of it: runs that differ only in these
        are repetitions.
        """
        ignored = ["method", "data", "backbone", "tasks", "seed", "order", "device", "precision"]
        ignored += [] if self.data in ANYTHING else ["data_root"]
        rest = {key: value for key, value in self.run.items() if key not in ignored}
        if self.data in ANYTHING and not self.run.get("data_root"):  # evidence, which has no folder of data
            names = sorted(self.per_class)
            rest["classes"] = f"{names[0]} to {names[-1]} ({len(names)})" if names else None
        return self.data, self.tasks, self.backbone, json.dumps(rest, sort_keys=True)

    @cached_property
    def key(self) -> str:
        """A text that is equal for runs that differ only in class order and seed."""
        run = [self.method, self.run.get("device"), self.run.get("precision")]
        return json.dumps([self.stream, run, self.settings], sort_keys=True)


RunResult = RunRecord


def read_run(folder: Path) -> RunRecord:
    """The finished run in `folder`.

    Raises:
        UserError: There is no `results.json`, or it is damaged.
    """
    path = folder / "results.json"
    try:
        values = read_json(path)
    except MissingFileError as error:
        raise UserError(f"{folder} holds no finished run (there is no results.json)") from error
    except UserError as error:
        raise _damaged(path, "results", error) from error
    return _record(values, _timing(folder / "timing.json"), folder, path)


def _record(values: Any, timing: dict[str, Any], folder: Path, path: Path) -> RunRecord:
    try:
        record = RunRecord.model_validate({**values, "timing": timing, "folder": folder})
        tables: list[Any] = [record.after, record.matrix, *record.matrix, record.between_tasks, *record.between_tasks]
        if any(len(table) != record.tasks for table in [*tables, record.drift or record.sizes]):
            raise UserError(f"its tables are not all of {record.tasks} tasks")
    except (ValidationError, TypeError, UserError) as error:
        raise _damaged(path, "results", error) from error
    return record


def _timing(path: Path) -> dict[str, Any]:
    try:
        return Timing.model_validate(read_json(path)).model_dump(exclude_unset=True)
    except MissingFileError:
        return {}
    except (ValidationError, UserError) as error:
        raise _damaged(path, "times", error) from error


def _damaged(path: Path, what: str, error: Exception) -> UserError:
    """An error that names the file and the first thing that is wrong in it."""
    reason = str(error).removeprefix(f"{path} ")
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False)[0]
        reason = f"'{'.'.join(map(str, first['loc']))}': {first['msg']}"
    return UserError(f"{path} is not the {what} of a run ({reason}); remove or redo it")


def find_runs(places: Iterable[Path]) -> list[RunRecord]:
    """Every finished run in or under these folders, each once, in the order of their paths.

    Args:
        places: Folders of runs, or folders that hold them. A folder with evidence (`runs.parquet`) is read like a
            folder of runs, and `EVIDENCE/PART` is the part of its runs whose ids begin with `PART/`.

    Raises:
        UserError: A place holds no finished run.
    """
    found: dict[Path, RunRecord] = {}
    for place in places:
        for run in _runs_in(place):
            found.setdefault(run.folder.resolve(), run)
    return list(found.values())


def _runs_in(place: Path) -> list[RunRecord]:
    if (evidence := find_evidence(place)) is not None:
        folder, part = evidence
        runs = [_kept(folder, row) for row in read_rows(folder) if not part or f"{row['id']}/".startswith(f"{part}/")]
    elif not place.is_dir():
        raise UserError(f"{place} is not a folder; name run folders, or the folder of a bench")
    else:
        whole = (place / "results.json").is_file()
        runs = [read_run(folder) for folder in ([place] if whole else sorted(_below(place)))]
    if not runs:
        raise UserError(f"{place} holds no finished run (there is no results.json in it or below)")
    return runs


def _kept(folder: Path, row: dict[str, Any]) -> RunRecord:
    values = {key: value for key, value in row.items() if key in RunRecord.model_fields and value is not None}
    timing = values.pop("timing")
    return _record(values, timing, folder / row["id"], folder / "runs.parquet")


def _below(place: Path) -> Iterator[Path]:
    """Folders under `place` that hold results; links are not followed, and any depth is fine."""
    waiting = [place]
    while waiting:
        folder = waiting.pop()
        try:
            entries = list(folder.iterdir())
        except OSError:  # a folder that may not be read, or whose path is too long
            continue
        waiting += [path for path in entries if path.is_dir() and not path.is_symlink()]
        if any(path.name == "results.json" for path in entries):
            yield folder

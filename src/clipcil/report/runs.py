"""Finished runs, read back from their folders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from clipcil.data.names import ANYTHING
from clipcil.errors import UserError
from clipcil.reading import Between, Count, MissingFileError, Text, read_json, typed

WHOLE = ("loading", "learning", "evaluation", "drift")
"""The phases that follow each other; the others lie inside `learning`."""


@dataclass(frozen=True)
class RunResult:
    """What `results.json` and `timing.json` of a run folder hold."""

    folder: Path
    values: dict[str, Any]
    timing: dict[str, Any]

    @property
    def run(self) -> dict[str, Any]:
        """The choices outside the method, such as `data` and `seed`."""
        return dict(self.values["config"]["run"])

    @property
    def settings(self) -> dict[str, Any]:
        """The method's own settings."""
        return dict(self.values["config"]["method"])

    @property
    def method(self) -> str:
        return str(self.run["method"])

    @property
    def data(self) -> str:
        return str(self.run["data"])

    @property
    def backbone(self) -> str:
        return str(self.run["backbone"])

    @property
    def seed(self) -> int:
        return int(self.run["seed"])

    @property
    def order(self) -> str:
        """The class order, such as `seed:1993`."""
        return str(self.run.get("order", ""))

    @property
    def tasks(self) -> int:
        return len(self.values["sizes"])

    @property
    def last(self) -> float:
        return float(self.values["last"])

    @property
    def average(self) -> float:
        return float(self.values["average"])

    @cached_property
    def test_pictures(self) -> int:
        """How many test pictures the run was measured on at the end."""
        return int(sum(sum(row) for row in self.values["between_tasks"]))

    @property
    def finished(self) -> str:
        """The day the run ended, such as 2026-01-31; empty where it was not written down."""
        return str(self.timing.get("finished", ""))[:10]

    @cached_property
    def seconds(self) -> float:
        """From loading to the last measurement."""
        phases = self.timing.get("seconds", {})
        return float(sum(phases.get(name, 0.0) for name in WHOLE))

    @cached_property
    def stream(self) -> tuple[str, int, str, str]:
        """What has to be equal for two runs to stand in one figure: data, tasks, backbone, and the rest.

        Class order and seed are not among it: runs that differ in these are repetitions.
        """
        ignored = ["method", "data", "backbone", "tasks", "seed", "order", "device", "precision"]
        ignored += [] if self.data in ANYTHING else ["data_root"]
        rest = {key: value for key, value in self.run.items() if key not in ignored}
        if self.data in ANYTHING and not self.run.get("data_root"):  # a kept run: its folder was left out
            names = sorted(self.values.get("per_class", {}))
            rest["classes"] = f"{names[0]} to {names[-1]} ({len(names)})" if names else None
        return self.data, self.tasks, self.backbone, json.dumps(rest, sort_keys=True)

    @cached_property
    def key(self) -> str:
        """The same for runs that differ in class order and seed alone."""
        run = [self.method, self.run.get("device"), self.run.get("precision")]
        return json.dumps([self.stream, run, self.settings], sort_keys=True)


class _Choices(TypedDict):
    """The table `run` of a config: those that are used here."""

    method: Text
    data: Text
    backbone: Text
    seed: Annotated[int, Between(0, 2**63 - 1)]
    data_root: NotRequired[Text | None]
    data_options: NotRequired[dict[str, Any]]
    hold_out: NotRequired[Annotated[int, Between(1, 10**9)] | None]


class _Config(TypedDict):
    run: _Choices
    method: dict[str, Any]


Percent = Annotated[float, Between(-100, 100)]
Percents = Annotated[list[Percent | None], Between(1, 10_000)]


class _Results(TypedDict):
    """What `results.json` must hold; more is allowed."""

    last: Percent
    average: Percent
    last_weighted: Percent
    average_weighted: Percent
    forgetting: Percent
    backward_transfer: Percent
    after: Annotated[list[Percent], Between(1, 10_000)]
    after_weighted: NotRequired[Percents]
    matrix: list[Percents]
    per_class: NotRequired[dict[str, Percent | None]]
    sizes: Annotated[list[Annotated[int, Between(1, 10**6)]], Between(1, 10_000)]
    drift: NotRequired[list[dict[str, Annotated[float, Between(-1e12, 1e12)]] | None]]
    between_tasks: list[list[Count]]
    notes: list[Text]
    config: _Config


class _Timing(TypedDict, total=False):
    finished: Text
    seconds: dict[str, Annotated[float, Between(0, 1e12)]]
    peak_megabytes: Any
    """One number; a table of phases in runs of version 0.1."""


def read_run(folder: Path) -> RunResult:
    """The finished run in `folder`; one line says what is wrong with it where there is none."""
    path = folder / "results.json"
    try:
        values = typed(read_json(path), _Results)
        tasks = len(values["sizes"])
        square = [values["after"], values["matrix"], *values["matrix"]]
        square += [values["between_tasks"], *values["between_tasks"]]
        if any(len(part) != tasks for part in [*square, values.get("drift", square[0])]):
            raise UserError(f"its tables are not all of {tasks} tasks")
    except MissingFileError as error:
        raise UserError(f"{folder} holds no finished run (there is no results.json)") from error
    except UserError as error:
        reason = str(error).removeprefix(f"{path} ")
        raise UserError(f"{path} is not the results of a run ({reason}); remove or redo it") from error
    return RunResult(folder, values, _timing(folder))


def find_runs(places: Iterable[Path]) -> list[RunResult]:
    """Every finished run in or under these folders, each once, in the order of their paths."""
    found: dict[Path, RunResult] = {}
    for place in places:
        if not place.is_dir():
            raise UserError(f"{place} is not a folder; name run folders, or the folder of a bench")
        whole = (place / "results.json").is_file()
        folders = [place] if whole else sorted(_below(place))
        if not folders:
            raise UserError(f"{place} holds no finished run (there is no results.json in it or below)")
        for folder in folders:
            found.setdefault(folder.resolve(), read_run(folder))
    return list(found.values())


def _below(place: Path) -> Iterator[Path]:
    """Folders under `place` that hold results; links are not followed, and any depth is fine."""
    waiting = [place]
    while waiting:
        folder = waiting.pop()
        try:
            entries = list(folder.iterdir())
        except OSError:  # one that may not be looked into, or whose path has become too long
            continue
        waiting += [path for path in entries if path.is_dir() and not path.is_symlink()]
        if any(path.name == "results.json" for path in entries):
            yield folder


def _timing(folder: Path) -> dict[str, Any]:
    path = folder / "timing.json"
    try:
        timing: dict[str, Any] = typed(read_json(path), _Timing)
    except MissingFileError:
        return {}
    except UserError as error:
        reason = str(error).removeprefix(f"{path} ")
        raise UserError(f"{path} is not the times of a run ({reason}); remove it") from error
    return timing

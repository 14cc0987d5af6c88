"""Finished runs, read back from their folders."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from clipcil.errors import UserError

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
    def tasks(self) -> int:
        return len(self.values["sizes"])

    @property
    def last(self) -> float:
        return float(self.values["last"])

    @property
    def average(self) -> float:
        return float(self.values["average"])

    @cached_property
    def seconds(self) -> float:
        """From loading to the last measurement."""
        phases = self.timing.get("seconds", {})
        return float(sum(phases.get(name, 0.0) for name in WHOLE))

    @cached_property
    def stream(self) -> tuple[str, int, str, str]:
        """What has to be equal for two runs to stand in one figure: data, tasks, backbone, and the rest."""
        ignored = ("method", "data", "backbone", "tasks", "seed", "device", "precision")
        rest = {key: value for key, value in self.run.items() if key not in ignored}
        return self.data, self.tasks, self.backbone, json.dumps(rest, sort_keys=True)

    @cached_property
    def key(self) -> str:
        """The same for runs that differ in the seed alone."""
        run = {name: value for name, value in self.run.items() if name != "seed"}
        return json.dumps([run, self.settings], sort_keys=True)


def read_run(folder: Path) -> RunResult:
    """The finished run in `folder`; one line says what is wrong with it where there is none."""
    path = folder / "results.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        found = RunResult(folder, values, _timing(folder))
        # Touch what everything else takes for granted, so that a foreign file is refused here and not in a figure.
        _ = (found.method, found.data, found.backbone, found.seed, found.tasks, found.last, found.average)
        _ = (found.settings, values["after"], values["matrix"], values["between_tasks"], values["notes"])
        return found
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no finished run (there is no results.json)") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not the results of a run ({type(error).__name__}); remove or redo it") from error


def find_runs(places: Iterable[Path]) -> list[RunResult]:
    """Every finished run in or under these folders, each once, in the order of their paths."""
    found: dict[Path, RunResult] = {}
    for place in places:
        if not place.is_dir():
            raise UserError(f"{place} is not a folder; name run folders, or the folder of a bench")
        whole = (place / "results.json").is_file()
        folders = [place] if whole else sorted(path.parent for path in place.rglob("results.json"))
        if not folders:
            raise UserError(f"{place} holds no finished run (there is no results.json in it or below)")
        for folder in folders:
            found.setdefault(folder.resolve(), read_run(folder))
    return list(found.values())


def _timing(folder: Path) -> dict[str, Any]:
    path = folder / "timing.json"
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}

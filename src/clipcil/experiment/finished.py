"""Finding the finished results of a run, in its own folder or among kept ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clipcil.data.names import ANYTHING
from clipcil.errors import UserError
from clipcil.experiment.inputs import inputs, inputs_changed
from clipcil.report.answers import PACKED, PLAIN
from clipcil.report.runs import RunResult, find_runs, read_run


def is_kept(folder: Path) -> bool:
    """Whether the run in `folder` is one that `clipcil claims --keep` has written."""
    return (folder / PACKED).is_file() and not (folder / PLAIN).exists()


def finished_run(folder: Path, table: dict[str, Any]) -> RunResult | None:
    """The results in `folder` if they are complete and of exactly these options and settings."""
    if not is_kept(folder) and not all((folder / name).is_file() for name in ("matrix.csv", PLAIN, "steps.jsonl")):
        return None
    try:
        found = read_run(folder)
    except UserError:  # damaged results are made again from the last checkpoint
        return None
    same = json.dumps(found.values["config"], sort_keys=True) == json.dumps(table, sort_keys=True)
    return found if same and not inputs_changed(folder, table) else None


class FinishedRuns:
    """Finds the results of a run in its own folder or among kept ones, which are found by options and settings.

    Args:
        kept: Folders of kept runs.

    Raises:
        UserError: One of them is no folder, or holds no finished run.
    """

    def __init__(self, kept: Sequence[Path] = ()) -> None:
        runs = find_runs(kept)
        self._kept = {_options_key(run.values["config"]): run for run in runs}
        self._devices = {_options_key(run.values["config"], "device"): str(run.run.get("device")) for run in runs}

    def find(self, folder: Path, table: dict[str, Any]) -> RunResult | None:
        """The results of exactly these options and settings; None where there are none."""
        if (done := finished_run(folder, table)) is not None:
            return done
        return None if inputs(table) else self._kept.get(_options_key(table))  # a kept run does not hold its `inputs`

    def other_device(self, folder: Path, table: dict[str, Any]) -> str:
        """The device of a kept run that differs from this one in nothing else, where this one is not finished."""
        return "" if self.find(folder, table) else self._devices.get(_options_key(table, "device"), "")


def _options_key(table: dict[str, Any], *without: str) -> str:
    """Options and settings without those that were not given, and without the place of a dataset that has a name."""
    run = {key: value for key, value in table["run"].items() if value is not None and key not in without}
    if run["data"] not in ANYTHING:
        run.pop("data_root", None)
    return json.dumps([run, table["method"]], sort_keys=True, default=str)

"""Results of runs that are finished: in a run's own folder, or among kept runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clipcil.data.names import ANYTHING
from clipcil.errors import UserError
from clipcil.experiment.inputs import inputs, inputs_changed
from clipcil.report.runs import RunRecord, find_runs, read_run

RUN_FILES = ("matrix.csv", "predictions.csv", "steps.jsonl")
"""Files that a finished run has beside `results.json`."""


def finished_run(folder: Path, table: dict[str, Any]) -> RunRecord | None:
    """The results in `folder`, or None where they are incomplete or of other options and settings.

    Args:
        folder: Folder of the run.
        table: Options and settings, as in `config.toml`.
    """
    if not all((folder / name).is_file() for name in RUN_FILES):
        return None
    try:
        found = read_run(folder)
    except UserError:  # damaged results are made again from the last checkpoint
        return None
    same = json.dumps(found.config, sort_keys=True) == json.dumps(table, sort_keys=True)
    return found if same and not inputs_changed(folder, table) else None


class FinishedRuns:
    """Finds the results of a run in its own folder, or among kept runs with the same options and settings.

    Args:
        kept: Folders of runs or of evidence.

    Raises:
        UserError: One of them holds no finished run.
    """

    def __init__(self, kept: Sequence[Path] = ()) -> None:
        runs = find_runs(kept)
        self._kept = {_options_key(run.config): run for run in runs}
        self._devices = {_options_key(run.config, "device"): str(run.run.get("device")) for run in runs}

    def find(self, folder: Path, table: dict[str, Any]) -> RunRecord | None:
        """The results of exactly these options and settings, or None."""
        if (done := finished_run(folder, table)) is not None:
            return done
        return None if inputs(table) else self._kept.get(_options_key(table))  # evidence has no digests of inputs

    def other_device(self, folder: Path, table: dict[str, Any]) -> str:
        """The device of a kept run that differs only in its device, where this run is not finished; else empty."""
        return "" if self.find(folder, table) else self._devices.get(_options_key(table, "device"), "")


def _options_key(table: dict[str, Any], *without: str) -> str:
    """Options and settings as text, without unset options and without the folder of a dataset that has a name."""
    run = {key: value for key, value in table["run"].items() if value is not None and key not in without}
    if run["data"] not in ANYTHING:
        run.pop("data_root", None)
    return json.dumps([run, table["method"]], sort_keys=True, default=str)

"""Runs kept as evidence: small files without weights, and the page of claims made from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clipcil.errors import UserError
from clipcil.files import part_names, refuse_links, write_json, write_text, write_toml
from clipcil.reading import MissingFileError, read_text, read_toml
from clipcil.report.answers import PACKED, read_predictions, write_packed
from clipcil.report.claims import Judged
from clipcil.report.claims_text import markdown
from clipcil.report.runs import RunResult, read_run

NOTES = "NOTES.md"
FIRST_LINE = "# The paper's claims, measured"
FILES = {"config.toml", "timing.json", PACKED, "results.json"}
"""The files of a kept run."""


def keep_runs(runs: Sequence[RunResult], folder: Path) -> int:
    """Write `results.json`, `config.toml`, `timing.json` and packed predictions of each run to a folder in `folder`.

    The folder of the data is left out of the settings: it is no part of the result. A run that lies in `folder` itself
    is kept already.

    Returns:
        The number of runs that are kept.

    Raises:
        UserError: A folder of the name of a run is there and holds something else, or two runs have the same name;
            nothing is written then.
    """
    refuse_links(folder)
    places: dict[Path, RunResult] = {}
    for run in runs:
        other = places.setdefault(folder / run.folder.resolve().name, run)
        if _config(other) != _config(run) or _classes(other) != _classes(run):
            raise UserError(f"{other.folder} and {run.folder} are two runs of one name; keep them in two folders")
    new = {place: run for place, run in places.items() if place.resolve() != run.folder.resolve()}
    for place, run in new.items():
        _refuse_others(place, run)
    for place, run in new.items():
        values = json.loads(json.dumps(run.values))
        values["config"]["run"].pop("data_root", None)
        predictions = read_predictions(run.folder)
        write_toml(place / "config.toml", _config(run))
        write_json(place / "timing.json", run.timing)
        write_packed(predictions, place / PACKED)
        write_text(place / "results.json", json.dumps(values, ensure_ascii=False) + "\n")
    return len(places)


def _refuse_others(place: Path, run: RunResult) -> None:
    """Refuse a folder that holds anything but this run as it is kept, or what a killed process wrote of it."""
    refuse_links(place)
    if not place.exists():
        return
    if not place.is_dir():
        raise UserError(f"{place} is there already and is no folder; keep the runs in another one")
    names = {path.name for path in place.iterdir()} - part_names(place, FILES.__contains__)
    ours = "config.toml" in names and names <= FILES and read_toml(place / "config.toml") == _config(run)
    if ours and "results.json" in names:  # the folder of the data is not kept: the classes tell it from another
        ours = _classes(read_run(place)) == _classes(run)
    if names and not ours:
        raise UserError(f"{place} is there already and does not hold the run in {run.folder}; name another folder")


def _config(run: RunResult) -> dict[str, Any]:
    """Options and settings as they are kept."""
    run_options = {key: value for key, value in run.run.items() if key != "data_root"}
    kept: dict[str, Any] = _without_none({**run.values["config"], "run": run_options})
    return kept


def _classes(run: RunResult) -> set[str]:
    return set(run.values.get("per_class", {}))


def _without_none(value: Any) -> Any:
    """The same without what TOML does not have."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value if item is not None] if isinstance(value, list) else value


def write_claims(judged: Sequence[Judged], runs: Sequence[RunResult], folders: Sequence[Path], out: Path) -> None:
    """Write the page of claims to `out`; a file that is no such page is not overwritten."""
    refuse_links(out)
    notes = []
    for folder in folders:
        try:
            notes.append(read_text(folder / NOTES))
        except MissingFileError:
            continue
    try:
        if not read_text(out).startswith(FIRST_LINE):
            raise UserError(f"{out} is there already and no page of claims; name another file with --out")
    except MissingFileError:
        pass
    write_text(out, markdown(judged, runs, "\n\n".join(notes)))

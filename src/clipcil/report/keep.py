"""Runs kept as evidence: small files without weights, and the page of claims made from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from clipcil.errors import UserError
from clipcil.files import refuse_links, write_json, write_text, write_toml
from clipcil.reading import MissingFileError, read_text
from clipcil.report.answers import PACKED, read_predictions, write_packed
from clipcil.report.claims import Judged
from clipcil.report.claims_text import markdown
from clipcil.report.runs import RunResult

NOTES = "NOTES.md"
FIRST_LINE = "# The paper's claims, measured"


def keep_runs(runs: Sequence[RunResult], folder: Path) -> int:
    """Write `results.json`, `config.toml`, `timing.json` and packed predictions of each run to a folder in `folder`.

    The folder of the data is left out of the settings: it is no part of the result.

    Returns:
        The number of runs written.
    """
    refuse_links(folder)
    for run in runs:
        place = folder / run.folder.resolve().name
        values = json.loads(json.dumps(run.values))
        values["config"]["run"].pop("data_root", None)
        config = {part: _without_none(table) for part, table in values["config"].items()}
        write_toml(place / "config.toml", config)
        write_json(place / "timing.json", run.timing)
        write_packed(read_predictions(run.folder), place / PACKED)
        write_text(place / "results.json", json.dumps(values, ensure_ascii=False) + "\n")
    return len(runs)


def _without_none(table: dict[str, object]) -> dict[str, object]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if value is not None
    }


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

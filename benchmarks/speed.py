"""The tables of speed in the documents: what `python -m benchmarks --json benchmarks/results/speed/NAME.json` measured.

Several files may be kept, such as one for each machine. A later one (by name) replaces the rows of an earlier one that
measure the same step.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.harness import Row
from clipcil.errors import UserError
from clipcil.reading import read_json
from reproduce.claims import markdown_table

HEAD = ("", "step", "peers' way", "ours", "result", "goal")


def read_kept(folder: Path) -> list[tuple[dict[str, Any], list[Row]]]:
    """Machine and rows of every file in the folder, without the rows that a later file measures again.

    Raises:
        UserError: There is no such file, or one of them was made with `--quick`, whose sizes say nothing about speed.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise UserError(f"{folder} has no measurement; `python -m benchmarks --json {folder}/NAME.json` makes one")
    names = {field.name for field in fields(Row)}
    kept: list[tuple[dict[str, Any], list[Row]]] = []
    for path in paths:
        found = read_json(path)
        if found["machine"]["quick"]:
            raise UserError(f"{path} was made with --quick, whose sizes say nothing about speed; measure again without")
        rows = [Row(**{key: value for key, value in row.items() if key in names}) for row in found["rows"]]
        again = {(row.name, row.step) for row in rows}
        kept = [(machine, [row for row in old if (row.name, row.step) not in again]) for machine, old in kept]
        kept.append((found["machine"], rows))
    return [(machine, rows) for machine, rows in kept if rows]


def speed_table(folder: Path, compared: bool = False) -> str:
    """A line for each step, P before S and by number, and under it the machines that the figures are of.

    Args:
        folder: Where the measurements are kept.
        compared: Only the steps that have a goal and are compared with the peers' way.
    """
    kept = read_kept(folder)
    if compared:
        kept = [(machine, [row for row in rows if row.theirs and row.goal]) for machine, rows in kept]
        kept = [(machine, rows) for machine, rows in kept if rows]
    rows = sorted((row for _, rows in kept for row in rows), key=lambda row: (row.name[0], int(row.name[1:])))
    lines = [
        [row.name, row.step, row.theirs, row.ours, row.result + ": **missed**" * (row.passed is False), row.goal]
        for row in rows
    ]
    machines = []
    for machine, own in kept:
        which = "" if len(kept) == 1 else f"{', '.join(dict.fromkeys(row.name for row in own))}: "
        threads = f"{machine['threads']} thread{'s' * (machine['threads'] != 1)} on {machine['cores']} cores"
        machines.append(
            f"{which}{threads} with {machine['instructions']} instructions, load before {machine['load before']},"
            f" torch {machine['torch']}."
        )
    return "\n".join([markdown_table(HEAD, lines), "", *machines])

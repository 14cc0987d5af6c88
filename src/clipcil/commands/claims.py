"""`clipcil claims`: judge the paper's claims by runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from clipcil.commands.types import File, Folder


def claims(
    runs: Annotated[tuple[Path, ...], Parameter(metavar="DIR…", show_default=False)] = (),
    /,
    *,
    out: File = None,
    keep: Folder = None,
) -> None:
    """Judge the claims of the paper by the runs in these folders: holds, does not hold, or cannot be told.

    The runs are made by `clipcil bench claims --data-root DIR`, which continues where it was stopped. --keep copies
    what the judgement needs, a folder for each run: results, settings and packed predictions, but no weights. What is
    there already is replaced only by the same run.

    For example:
      clipcil claims results/
      clipcil claims results/ --out docs/claims.md
      clipcil claims runs/bench --keep results/

    Args:
        runs: Folders of runs, or folders that hold them.
        out: Write a Markdown page with every comparison. A file NOTES.md in the folder of runs becomes part of it.
        keep: Copy what the judgement needs to this folder.
    """
    from rich.console import Console
    from rich.table import Table

    from clipcil.errors import UserError, printable
    from clipcil.experiment.claims import judge_claims, outdated
    from clipcil.report.claims import summary
    from clipcil.report.claims_text import stream_namer
    from clipcil.report.keep import keep_runs, write_claims
    from clipcil.report.runs import find_runs

    if not runs:
        raise UserError("name at least one folder of runs, such as results/ or that of clipcil bench claims")
    found = find_runs(runs)
    judged = judge_claims(found)
    if not judged:
        raise UserError("none of these runs belongs to a claim; clipcil bench claims makes those that do")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("claim")
    table.add_column("verdict")
    for row in summary(judged, stream_namer(list(dict.fromkeys(each.stream for each in judged)))):
        table.add_row(*map(printable, row))
    Console(highlight=False, markup=False).print(table)
    for line in outdated(found):
        print(printable(f"note: {line}"))
    if keep is not None:
        print(printable(f"{keep_runs(found, keep)} runs kept in {keep}"))
    if out is not None:
        write_claims(judged, found, runs, out)
        print(printable(f"every comparison in {out}"))

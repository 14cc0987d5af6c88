"""`clipcil report`: a page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN…")],
    out: Path | None = None,
    tensorboard: bool = False,
    allow_download: bool = False,
) -> None:
    """Write one HTML file about runs, with everything inside it, and its figures as PNGs beside it.

    Accuracy after each task, the R matrix, forgetting, drift before and after calibration, confusion between tasks,
    seconds per phase, measured beside paper, settings, and pictures with right and wrong predictions.
    Examples: clipcil report runs/2026-01-31-dmc-ot-emoji; clipcil report runs/bench --out report.html.

    Args:
        runs: Folders of runs, or folders that hold them, such as that of a bench.
        out: The file. Default: report.html in the folder named, or here where several are named.
        tensorboard: Write TensorBoard event files too (needs the extra tensorboard).
        allow_download: Fetch a dataset that a run names and this machine lacks, to show its pictures.
    """
    from clipcil.errors import UserError, printable
    from clipcil.experiment.claims import judge_claims
    from clipcil.network import allow_downloads
    from clipcil.report.claims_text import section
    from clipcil.report.page import write_report
    from clipcil.report.runs import find_runs

    if not runs:
        raise UserError("name at least one folder of a run; clipcil run and clipcil bench print theirs")
    found = find_runs(runs)
    path = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    with allow_downloads(allow_download):
        figures = write_report(found, path, section(judge_claims(found)))
    where = path.with_name(f"{path.stem}-figures")
    print(printable(f"{path}: {len(found)} runs, {len(figures)} figures (also in {where})"))
    if tensorboard:
        from clipcil.report.tensorboard import write_tensorboard

        folder = path.with_name(f"{path.stem}-tensorboard")
        write_tensorboard(found, folder)
        print(printable(f"event files in {folder}; tensorboard --logdir {folder}"))

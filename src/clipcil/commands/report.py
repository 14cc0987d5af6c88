"""`clipcil report`: a page about runs, or about a model."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from clipcil.commands.types import File, Flag
from clipcil.errors import UserError, counted
from clipcil.network import allow_downloads


def report(
    runs: Annotated[tuple[Path, ...], Parameter(metavar="RUN…", show_default=False)] = (),
    /,
    *,
    out: File = None,
    allow_download: Flag = False,
) -> None:
    """Write one self-contained HTML file about runs, and its figures as PNG files beside it.

    The page shows the accuracy after each task, the accuracy matrix, forgetting, drift before and after calibration,
    confusion between tasks, seconds per phase, the paper's numbers beside the measured ones, settings, and pictures
    with right and wrong predictions. For a taught model it shows the accuracy over all classes after each lesson, a
    confusion matrix, the classes with their small pictures, and what to do next.

    For example:
      clipcil report runs/2026-01-31-dmc-ot-emoji
      clipcil report runs/bench --out report.html
      clipcil report birds/ --out birds.html

    Args:
        runs: Folders of runs, or folders that hold them, such as that of a bench; or one taught model.
        out: File to write. Default: report.html in the folder given, or here if several are; for a model, MODEL.html.
        allow_download: Allow downloading the dataset that a run names, to show its pictures.
    """
    from clipcil.classifier.folder import MODEL
    from clipcil.classifier.load import load
    from clipcil.classifier.small_pictures import SmallPictures
    from clipcil.commands import text
    from clipcil.report.page import write_model_page, write_report
    from clipcil.report.runs import find_runs

    if not runs:
        raise UserError("name at least one folder of a run; clipcil run and clipcil bench print theirs")
    if (runs[0] / MODEL).is_file():
        if len(runs) > 1:
            raise UserError(f"{runs[0]} is a taught model; name one model alone, or runs")
        path = out or runs[0].resolve().with_name(f"{runs[0].resolve().name}.html")
        model = load(runs[0], allow_download=allow_download)
        write_model_page(path, model, runs[0], {name: SmallPictures(runs[0]).of(name) for name in model.classes})
        text.say(f"{path}: the model in {runs[0]}")
        return
    found = find_runs(runs)
    path = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    with allow_downloads(allow_download):
        figures = write_report(found, path)
    number = len({(run.key, run.order, run.seed) for run in found})  # a run that is in two folders counts once
    counts = f"{counted(number, 'run')}, {counted(len(figures), 'figure')}"
    text.say(f"{path}: {counts} (also in {path.with_name(f'{path.stem}-figures')})")

"""`clipcil bench`: a grid of methods × datasets × seeds, beside the paper's numbers; `clipcil sweep`: a curve."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from clipcil.commands.types import File, Flag, takes
from clipcil.errors import UserError, quoted

if TYPE_CHECKING:
    from pathlib import Path

    from clipcil.experiment.bench import RunOutcome
    from clipcil.experiment.grid import PlannedRun
    from clipcil.experiment.spec import Grid

OF_NO_GRID = ("run", "method", "seed", "devices", "nodes", "code")
"""Fields of `Grid` and `RunSpec` that a grid of runs does not take as options."""


@takes("Grid", "RunSpec", without=OF_NO_GRID)
def bench(table: str | None = None, /, *, quiet: Flag = False, dry_run: Flag = False, **options: Any) -> None:
    """Run methods × datasets × seeds and print A_B and Ā beside the paper's.

    Finished runs are not repeated and stopped runs are continued, so the same command can be given again. A run that
    fails is reported while the others go on. TABLE is a table of the paper: table1 (10 tasks), table2 (20 tasks),
    table3 (two stages), table4 (optimal transport), table5 (task prompt) or sensitivity (M, β, λ); or claims, the runs
    that test the claims of the paper, in three class orders. It sets the backbone, the class orders and the number of
    tasks where they are not given.

    For example:
      clipcil bench table1 --data-root DIR --seeds 3
      clipcil bench table1 --only 'dmc*' cifar100 --shots 50
      clipcil bench table4 --data emoji --backbone mini
      clipcil bench --data emoji --methods all --jobs 2
      clipcil bench --methods mine.py simplecil --seeds 3
      clipcil bench claims --data-root DIR --kept reproduce/evidence --dry-run

    Args:
        table: A table of the paper. Default: none, but the methods and datasets named, on the embedded backbone.
        quiet: Print the closing table only.
        dry_run: List the runs and how many of them are finished; run nothing.
    """
    from clipcil.experiment.bench import RESULTS, lines_of
    from clipcil.experiment.grid import plan
    from clipcil.paper import read_table
    from clipcil.report.compare import print_comparison

    grid = _grid({**options, "table": table})
    if dry_run:
        _list(plan(grid), grid)
        return
    finished = _do(plan(grid), grid, quiet)
    paper = read_table(grid.table) if grid.table else None
    print_comparison(lines_of(finished, grid.table or ""), paper.title if paper else "")
    notes = [f"Note: {paper.note}."] if paper and paper.note else []
    folders = " ".join(map(quoted, _folders(finished, grid)))
    where = f"Each run is a line of {grid.out / RESULTS}; clipcil report {folders} makes a page of them"
    _close(finished, grid, quiet, [*notes, where])


@takes("Grid", "RunSpec", without=(*OF_NO_GRID, "table", "methods", "only"))
def sweep(
    method: str,
    key: str,
    values: Annotated[tuple[str, ...], Parameter(metavar="VALUE…", show_default=False)] = (),
    /,
    *,
    plot: File = None,
    quiet: Flag = False,
    **options: Any,
) -> None:
    """Vary one option of a method, print the numbers and plot the curve.

    Runs already finished, by a sweep or a bench with the same folder, are not repeated. KEY may also be M, β (beta) or
    λ (lambda), the paper's names of prompt_length, beta and ortho; without VALUE these take the values of the paper's
    sensitivity study.

    For example:
      clipcil sweep dmc-ot beta 0 0.05 0.1 0.5
      clipcil sweep dmc-ot M --seeds 3
      clipcil sweep dmc-ot stage1.lr 1e-5 3e-5 1e-4 --data emoji cifar100 --data-root DIR
      clipcil sweep dmc-ot tasks 5 10 20

    Args:
        method: The method: a name (`clipcil methods` lists them), or a file with one, such as mine.py.
        key: A setting of the method, or an option of the run: tasks, increment, shots, order, backbone, …
        values: Values to try.
        plot: File for the curve: .png, .svg or .pdf. Default: sweep-METHOD-KEY.png in the folder of the runs.
        quiet: Print the table only.
    """
    from clipcil.commands.text import print_table
    from clipcil.experiment.bench import lines_of
    from clipcil.experiment.grid import plan_sweep
    from clipcil.methods.registry import named_method
    from clipcil.report.compare import MeanStd
    from clipcil.report.figures import Curve, check_plot, save_sweep

    method, grid = named_method(method).name, _grid(options)
    path = plot or grid.out / f"sweep-{method}-{key.replace('/', '-')}.png"
    check_plot(path)  # before the runs, which may take hours
    finished = _do(plan_sweep(method, key, values, grid), grid, quiet, f"; each line names the value of {key}")
    rows, curves = [], dict[str, list[tuple[str, MeanStd, MeanStd]]]()
    for line in lines_of(finished):
        if (group := line.group) is not None:
            rows.append((line.data, line.label, len(group.runs), group.last, group.average, f"{group.seconds:.1f}"))
            curves.setdefault(line.data, []).append((line.label, group.last, group.average))
    print_table(("data", key, "runs", "A_B", "Ā", "seconds"), rows, title=f"{method}: {key}")
    lines = []
    if curves:
        save_sweep([Curve(*each) for each in curves.items()], f"{method}: accuracy by {key}", key, path)
        lines.append(f"curve in {path}")
    _close(finished, grid, quiet, lines)


def _grid(options: dict[str, Any]) -> Grid:
    from clipcil.experiment.spec import Grid
    from clipcil.settings import build

    names = {field.name for field in fields(Grid)}
    own = {name: value for name, value in options.items() if name in names}
    return build(Grid, {**own, "run": {name: value for name, value in options.items() if name not in names}})


def _list(planned: list[PlannedRun], grid: Grid) -> None:
    """Print how many runs of the grid are finished."""
    from clipcil.commands.text import print_table, say
    from clipcil.experiment.bench import FinishedRuns, distinct

    known, runs = FinishedRuns(grid.kept), distinct(planned)
    states = {run.folder: known.state(run) for run in runs}
    lines: dict[tuple[str, str, int | None], Counter[str]] = {}
    for each in planned:
        lines.setdefault(each.line, Counter())[states[each.folder]] += 1
    rows = []
    for (label, data, tasks), count in lines.items():
        name = f"{label} (cannot be run)" if count["cannot be run"] else label
        rows.append((name, data, tasks or "", count.total(), count["finished"] or "", count["begun"] or ""))
    print_table(("method", "data", "tasks", "runs", "finished", "begun"), rows, left=2)
    unfinished = [run for run in runs if states[run.folder] != "finished"]
    places = ", ".join(map(str, (grid.out, *grid.kept)))
    say(f"{len(runs) - len(unfinished)} of {len(runs)} runs are finished in {places}")
    say(*(f"note: {line}" for line in known.on_other_devices(unfinished)))
    say(*(f"cannot be run: {problem}" for problem in dict.fromkeys(each.problem for each in planned if each.problem)))


def _do(planned: list[PlannedRun], grid: Grid, quiet: bool, about: str = "") -> list[RunOutcome]:
    from clipcil.commands.text import say
    from clipcil.experiment.bench import distinct, run_grid
    from clipcil.experiment.monitor import Display, open_display

    tell: Callable[[str], None] = (lambda line: None) if quiet else say
    tell(f"{len(distinct(planned))} runs, in {grid.out}{about}")
    display = open_display if sys.stdout.isatty() and not quiet else Display
    return run_grid(planned, grid, tell, display)


def _folders(finished: list[RunOutcome], grid: Grid) -> list[Path]:
    """Where the runs are: in the folder of the grid, among the kept ones, or in both."""
    kept = [each for each in finished if each.result is not None and each.result.folder != each.planned.folder]
    return [*([grid.out] if len(kept) < len(finished) else []), *(grid.kept if kept else ())]


def _close(finished: list[RunOutcome], grid: Grid, quiet: bool, lines: list[str]) -> None:
    from clipcil.commands.text import say
    from clipcil.experiment.bench import RESULTS

    if count := grid.run.get("hold_out"):
        lines = [f"Measured on {count} held-out training pictures per class, not on the test pictures.", *lines]
    if not quiet:
        say(*lines)
    if failed := sum(each.result is None for each in finished):
        raise UserError(f"{failed} of {len(finished)} runs failed; see the reasons above and in {grid.out / RESULTS}")

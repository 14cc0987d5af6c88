"""`clipcil sweep`: one option, several values, a curve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

Words = Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE…")]
Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME…")]


def sweep(
    method: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="METHOD")],
    key: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="KEY")],
    values: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="VALUE…")] = (),
    data: Names = (),
    seeds: int = 1,
    shrink: int | None = None,
    tasks: int | None = None,
    increment: int | None = None,
    order: str | None = None,
    backbone: str | None = None,
    data_root: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FOLDER|DATASET=FOLDER…")] = (),
    data_set: Words = (),
    set: Words = (),
    skip_broken: bool = False,
    device: str | None = None,
    precision: str | None = None,
    out: Path = Path("runs/bench"),
    plot: Path | None = None,
    quiet: bool = False,
) -> None:
    """Vary one option of a method, print the numbers and plot the curve.

    Runs already done, by a sweep or a bench with the same folder, are not run again. M, β (beta) and λ (lambda) are
    the paper's names of prompt_length, beta and ortho; without values they take those of the sensitivity study.
    Examples: clipcil sweep dmc-ot beta 0 0.05 0.1 0.5; clipcil sweep dmc-ot M --seeds 3; clipcil sweep dmc-ot
    stage1.lr 1e-5 3e-5 1e-4 --data emoji cifar100 --data-root DIR; clipcil sweep dmc-ot tasks 5 10 20.

    Args:
        method: Which method; `clipcil methods` lists them.
        key: The option: a setting of the method, or tasks, increment, shots, order, backbone, …
        values: Its values.
        data: Datasets, a curve each. Default: emoji.
        seeds: How many seeds: 3 means 0, 1 and 2.
        shrink: At most this many training pictures per class.
        tasks: Number of tasks. Default: 10.
        increment: Classes per task, instead of a number of tasks.
        order: Class order: natural, seed:N, icarl, or a file. Default: seed:1993.
        backbone: Default: mini.
        data_root: A folder with a folder for each dataset, or words dataset=folder.
        data_set: Options of the datasets, such as split=random.
        set: Other settings of the method, the same in all runs.
        skip_broken: Leave out pictures that cannot be decoded instead of stopping.
        device: cpu, cuda, mps or auto. Default: cpu.
        precision: 32-true, bf16-mixed or 16-mixed. Default: 32-true.
        out: Folder that holds a folder for each run, and results.jsonl.
        plot: Where the curve goes. Default: sweep-METHOD-KEY.png in that folder.
        quiet: Print the table only.
    """
    from rich.console import Console
    from rich.table import Table

    from clipcil.commands.bench import split
    from clipcil.errors import UserError
    from clipcil.experiment.bench import RESULTS, run_grid
    from clipcil.experiment.display import Display, open_display
    from clipcil.experiment.grid import Grid
    from clipcil.experiment.sweep import plan_sweep, points_of
    from clipcil.report.curve import Curve, save_sweep

    chosen = {
        "tasks": tasks, "increment": increment, "order": order, "backbone": backbone, "shots": shrink,
        "skip_broken": skip_broken or None, "device": device, "precision": precision,
    }  # fmt: skip
    run = {name: value for name, value in chosen.items() if value is not None}
    grid = Grid(None, (method,), split(data), (), seeds, data_root, set, data_set, run)
    planned = plan_sweep(method, key, values, grid, out)
    console = Console(highlight=False, soft_wrap=True)

    def say(line: str) -> None:
        if not quiet:
            console.print(line, markup=False)

    say(f"{len(planned)} runs, in {out}; each line names the value of {key}")
    live = console.is_terminal and not quiet
    finished = run_grid(planned, out, say, open_display if live else Display)
    points = points_of(finished)
    table = Table(title=f"{method}: {key}", title_justify="left", box=None, pad_edge=False)
    for header in ("data", key, "seeds", "A_B", "Ā", "seconds"):
        table.add_column(header, justify="left" if header == "data" else "right", no_wrap=True)
    for point in points:
        row = (point.data, point.value, str(point.seeds), str(point.last), str(point.average), f"{point.seconds:.1f}")
        table.add_row(*row)
    Console().print(table)
    if points:
        names = dict.fromkeys(point.data for point in points)
        curves = [Curve(name, [(p.value, p.last, p.average) for p in points if p.data == name]) for name in names]
        path = plot or out / f"sweep-{method}-{key.replace('/', '-')}.png"
        save_sweep(curves, f"{method}: accuracy by {key}", key, path)
        say(f"curve in {path}")
    failed = sum(each.result is None for each in finished)
    if failed:
        raise UserError(f"{failed} of {len(finished)} runs failed; the reasons stand above and in {out / RESULTS}")

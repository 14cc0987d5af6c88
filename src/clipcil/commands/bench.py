"""`clipcil bench`: a grid of methods × datasets × seeds, beside the paper's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

Words = Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE…")]
Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME…")]


def bench(
    table: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="TABLE")] = None,
    methods: Names = (),
    data: Names = (),
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATTERN…")] = (),
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
    quiet: bool = False,
) -> None:
    """Run methods × datasets × seeds in one process and print A_B and Ā beside the paper's.

    Runs already done are not run again, a run that was stopped goes on, a run that fails is reported and the rest go
    on: give the same command again. Tables of the paper: table1 (10 tasks), table2 (20 tasks), table3 (two stages),
    table4 (optimal transport), table5 (task prompt), sensitivity (M, β, λ).
    Examples: clipcil bench table1 --data-root DIR --device cuda --seeds 3; clipcil bench --data emoji --methods all;
    clipcil bench table4 --data emoji --backbone mini; clipcil bench table1 --only 'dmc*' cifar100 --shrink 50.

    Args:
        table: A table of the paper. Without one: the methods and datasets named, on the embedded backbone.
        methods: Methods (names, patterns or all). Default: all of the table, or all there are.
        data: Datasets. Default: those of the table, or emoji.
        only: Patterns of methods, rows and datasets that cut the grid down.
        seeds: How many seeds: 3 means 0, 1 and 2.
        shrink: At most this many training pictures per class.
        tasks: Number of tasks. Default: the table's, or 10.
        increment: Classes per task, instead of a number of tasks.
        order: Class order: natural, seed:N, icarl, or a file. Default: seed:1993.
        backbone: Default: the paper's for a table (openai/clip-vit-base-patch16), else mini.
        data_root: A folder with a folder for each dataset, or words dataset=folder.
        data_set: Options of the datasets, such as split=random.
        set: Settings of the methods; a method that has no such setting goes without it.
        skip_broken: Leave out pictures that cannot be decoded instead of stopping.
        device: cpu, cuda, mps or auto. Default: cpu.
        precision: 32-true, bf16-mixed or 16-mixed. Default: 32-true.
        out: Folder that holds a folder for each run, and results.jsonl.
        quiet: Print the closing table only.
    """
    from rich.console import Console

    from clipcil.errors import UserError
    from clipcil.experiment.bench import RESULTS, lines_of, run_grid
    from clipcil.experiment.display import Display, open_display
    from clipcil.experiment.grid import Grid, plan
    from clipcil.paper import read_table
    from clipcil.report.console import print_comparison

    chosen = {
        "tasks": tasks, "increment": increment, "order": order, "backbone": backbone, "shots": shrink,
        "skip_broken": skip_broken or None, "device": device, "precision": precision,
    }  # fmt: skip
    run = {key: value for key, value in chosen.items() if value is not None}
    grid = Grid(table, split(methods), split(data), split(only), seeds, data_root, set, data_set, run)
    planned = plan(grid, out)
    console = Console(highlight=False, soft_wrap=True)

    def say(line: str) -> None:
        if not quiet:
            console.print(line, markup=False)

    say(f"{len(planned)} runs, in {out}")
    live = console.is_terminal and not quiet
    finished = run_grid(planned, out, say, open_display if live else Display)
    print_comparison(lines_of(finished, table or ""), read_table(table).title if table else "", Console())
    if table and read_table(table).note:
        say(f"Note: {read_table(table).note}.")
    failed = [each for each in finished if each.result is None]
    if failed:
        raise UserError(f"{len(failed)} of {len(finished)} runs failed; the reasons stand above and in {out / RESULTS}")
    say(f"Each run is a line of {out / RESULTS}; clipcil report {out} makes a page of them")


def split(words: tuple[str, ...]) -> tuple[str, ...]:
    """`a,b c` → a, b, c."""
    return tuple(part for word in words for part in word.split(",") if part)

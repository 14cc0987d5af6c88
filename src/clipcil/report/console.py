"""The table of measured numbers beside the paper's, on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from clipcil.errors import printable
from clipcil.paper import PaperResult
from clipcil.paper.tables import BACKBONE
from clipcil.report.compare import Group, MeanStd


@dataclass(frozen=True)
class Line:
    """One line of the table; `group` is None where every run of it failed."""

    label: str
    data: str
    tasks: int | None
    group: Group | None
    paper: PaperResult | None
    failed: int = 0


def print_comparison(lines: Sequence[Line], title: str, console: Console | None = None) -> None:
    """A_B, Ā and seconds of each line, with the paper's numbers and the difference where it has them."""
    console = console or Console(markup=False)
    with_paper = any(line.paper for line in lines)
    whole = _wide(lines, title, with_paper)
    if console.measure(whole, options=console.options.update(max_width=10_000)).maximum <= console.width:
        console.print(whole)
    else:
        for table in _narrow(lines, title, with_paper):
            console.print(table)
    backbones = {line.group.first.backbone for line in lines if line.group is not None} - {BACKBONE}
    if with_paper and backbones:
        console.print(f"The paper's numbers are of {BACKBONE}; these are of {', '.join(sorted(backbones))}.")


def _table(title: str, first: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for header in first:
        table.add_column(header, overflow="fold")
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _wide(lines: Sequence[Line], title: str, with_paper: bool) -> Table:
    """One table, a row for each line."""
    beside = ["paper", "Δ"] if with_paper else []
    table = _table(title, ["method", "data"], ["tasks", "runs", "A_B", *beside, "Ā", *beside, "seconds"])
    for line in lines:
        table.add_row(*map(printable, _cells(line, with_paper)))
    return table


def _narrow(lines: Sequence[Line], title: str, with_paper: bool) -> list[Table]:
    """A table for each dataset and number of tasks, A_B above Ā: it fits 80 columns."""
    streams: dict[tuple[str, int | None], list[Line]] = {}
    for line in lines:
        streams.setdefault((line.data, line.tasks), []).append(line)
    tables = []
    for (data, tasks), members in streams.items():
        name = f"{data}, {tasks or '—'} tasks"
        heading = f"{title}: {name}" if title else name
        table = _table(heading, ["method"], ["", "ours", *(["paper", "Δ"] if with_paper else []), "runs", "seconds"])
        for line in members:
            label, _, _, runs, *numbers, seconds = map(printable, _cells(line, with_paper))
            half = len(numbers) // 2
            table.add_row(label, "A_B", *numbers[:half], runs, seconds)
            table.add_row("", "Ā", *numbers[half:], "", "")
        tables.append(table)
    return tables


def _cells(line: Line, with_paper: bool) -> list[str]:
    group, paper = line.group, line.paper
    runs = str(len(group.runs)) if group else "0"
    runs += f" (+{line.failed} failed)" if line.failed else ""
    cells = [line.label, line.data, str(line.tasks or "—"), runs]
    for ours, theirs in (
        (group.last if group else None, paper.last if paper else None),
        (group.average if group else None, paper.average if paper else None),
    ):
        cells.append(str(ours) if ours else "—")
        if with_paper:
            cells += ["—" if theirs is None else f"{theirs:.2f}", difference(ours, theirs)]
    return [*cells, f"{group.seconds:.1f}" if group else "—"]


def difference(ours: MeanStd | None, theirs: float | None) -> str:
    """Ours − the paper's, with its sign; a dash where one of them is not there."""
    return "—" if ours is None or theirs is None else f"{ours.mean - theirs:+.2f}"

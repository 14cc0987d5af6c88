"""The table of measured numbers beside the paper's, on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from clipcil.errors import printable
from clipcil.paper import BACKBONE, PaperResult
from clipcil.report.compare import Group


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
    """A_B, Ā and seconds of each line, with the paper's numbers and the difference where it has them.

    Where one table is wider than the terminal, there is one for each dataset and number of tasks, A_B above Ā: it fits
    80 columns.
    """
    console = console or Console(markup=False)
    beside = ["paper", "Δ"] if any(line.paper for line in lines) else []
    whole = _table(title, ["method", "data"], ["tasks", "runs", "A_B", *beside, "Ā", *beside, "seconds"])
    narrow: dict[str, Table] = {}
    for line in lines:
        runs, last, average, seconds = _cells(line, bool(beside))
        whole.add_row(printable(line.label), line.data, str(line.tasks or "—"), runs, *last, *average, seconds)
        stream = f"{line.data}, {line.tasks or '—'} tasks"
        heading = f"{title}: {stream}" if title else stream
        narrow.setdefault(stream, _table(heading, ["method"], ["", "ours", *beside, "runs", "seconds"]))
        narrow[stream].add_row(printable(line.label), "A_B", *last, runs, seconds)
        narrow[stream].add_row("", "Ā", *average, "", "")
    fits = console.measure(whole, options=console.options.update(max_width=10_000)).maximum <= console.width
    for table in [whole] if fits else narrow.values():
        console.print(table)
    backbones = {line.group.first.backbone for line in lines if line.group is not None} - {BACKBONE}
    if beside and backbones:
        console.print(f"The paper's numbers are of {BACKBONE}; these are of {', '.join(sorted(backbones))}.")


def _table(title: str, first: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for header in first:
        table.add_column(header, overflow="fold")
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _cells(line: Line, with_paper: bool) -> tuple[str, list[str], list[str], str]:
    """The number of runs; A_B and Ā with the paper's number and the difference; the seconds."""
    group, paper = line.group, line.paper
    found = []
    for key in ("last", "average"):
        ours, theirs = group.of(key) if group else None, getattr(paper, key, None)
        beside = ["—" if theirs is None else f"{theirs:.2f}"]
        beside.append("—" if ours is None or theirs is None else f"{ours.mean - theirs:+.2f}")
        found.append([str(ours) if ours else "—", *(beside if with_paper else [])])
    runs = (str(len(group.runs)) if group else "0") + (f" (+{line.failed} failed)" if line.failed else "")
    return runs, found[0], found[1], f"{group.seconds:.1f}" if group else "—"

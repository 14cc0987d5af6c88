"""Runs grouped by method and settings, compared on each stream of tasks and with the paper's numbers.

`print_comparison` prints the table of `clipcil bench` on a terminal.
"""

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from clipcil.errors import printable
from clipcil.intervals import Interval, signed
from clipcil.paper import BACKBONE, PaperResult, paper_result, read_table
from clipcil.report.runs import RunRecord
from clipcil.report.statistics import Bootstrap, paired
from clipcil.report.style import Look, assign_looks

SAME = 0.005
"""Numbers nearer than this are printed the same."""
Stream = tuple[str, int, str, str]
"""Data, number of tasks, backbone, and the other choices as JSON."""


class MeanStd(NamedTuple):
    """Mean and standard deviation (n − 1) over runs; no deviation for one run."""

    mean: float
    std: float | None

    def __str__(self) -> str:
        spread = "" if self.std is None else " (constant)" if self.std < SAME else f" ± {self.std:.2f}"
        return f"{self.mean:.2f}{spread}".replace("-", "−")


def mean_std(values: Iterable[float]) -> MeanStd:
    """Mean and standard deviation of some numbers."""
    numbers = list(values)
    return MeanStd(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)


@dataclass(frozen=True)
class Group:
    """The runs of one method with one choice of settings on one stream of tasks, by class order and seed."""

    label: str
    runs: tuple[RunRecord, ...]

    @property
    def first(self) -> RunRecord:
        return self.runs[0]

    @property
    def stream(self) -> Stream:
        return self.first.stream

    def of(self, key: str) -> MeanStd:
        """Mean and standard deviation over the runs of one of their numbers, such as `forgetting`."""
        return mean_std(float(getattr(run, key)) for run in self.runs)

    @property
    def last(self) -> MeanStd:
        return self.of("last")

    @property
    def average(self) -> MeanStd:
        return self.of("average")

    @property
    def seconds(self) -> float:
        return self.of("seconds").mean

    @property
    def timed(self) -> bool:
        return all(run.timing.seconds for run in self.runs)

    @property
    def orders(self) -> list[str]:
        """The class orders, each once."""
        return list(dict.fromkeys(run.order for run in self.runs))

    @property
    def over(self) -> str:
        """The number of class orders, seeds or runs, such as `3 class orders`."""
        orders, seeds = len(self.orders), len({run.seed for run in self.runs})
        if orders > 1 and seeds > 1:
            return f"{len(self.runs)} runs of {orders} class orders and {seeds} seeds"
        return f"{orders} class orders" if orders > 1 else f"{seeds} seeds" if seeds > 1 else "1 run"

    def paper_result(self, table: str = "") -> PaperResult | None:
        """The paper's numbers for the same method, settings, data and number of tasks; None for held-out pictures."""
        if self.first.run.get("hold_out"):
            return None
        return paper_result(self.first.method, self.first.settings, self.first.data, self.first.tasks, table)


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Groups in the order of the paper's table. A run found in two folders counts once."""
    by_key: dict[str, dict[tuple[str, int], RunRecord]] = {}
    for run in runs:
        by_key.setdefault(run.key, {}).setdefault((run.order, run.seed), run)
    groups = [tuple(members[place] for place in sorted(members)) for members in by_key.values()]
    return sorted(map(Group, _labels([members[0] for members in groups]), groups), key=_place)


def _place(group: Group) -> tuple[int, str, list[tuple[int, float, str]]]:
    """The paper's order of methods, then the others by name; variants by their numbers (0.5 before 10)."""
    known = [row.method for row in read_table("table1").rows]
    method = group.first.method
    parts = re.split(r"(\d+(?:\.\d+)?(?:e-?\d+)?)", group.label)
    words = [(0, float(part), "") if index % 2 else (1, 0.0, part) for index, part in enumerate(parts)]
    return known.index(method) if method in known else len(known), method, words


def method_title(method: str) -> str:
    """The title of a method in tables; its name where it is not registered."""
    from clipcil.methods.registry import methods

    kind = methods().get(method)
    return kind.title if kind is not None else method


def _labels(runs: Sequence[RunRecord]) -> list[str]:
    """The method's title with the settings, device and precision that distinguish variants on the same stream.

    With three or more variants, a value shared by more than half of them is left out of the labels.
    """
    families: dict[Any, list[dict[str, Any]]] = {}
    choices = [{**{key: run.run.get(key) for key in ("device", "precision")}, **flatten(run.settings)} for run in runs]
    for run, own in zip(runs, choices, strict=True):
        families.setdefault((run.method, run.stream), []).append(own)
    labels = []
    for run, own in zip(runs, choices, strict=True):
        family, words = families[run.method, run.stream], []
        for key in sorted({key for settings in family for key in settings}):
            alike = sum(settings.get(key) == own.get(key) for settings in family)
            if alike < len(family) and (len(family) < 3 or 2 * alike <= len(family)):
                words.append(f"{key}={show(own.get(key))}")
        title = method_title(run.method)
        labels.append(f"{title} ({', '.join(words)})" if words else title)
    return labels


def flatten(table: dict[str, Any], before: str = "") -> dict[str, Any]:
    """`{"stage1": {"lr": 1}}` → `{"stage1.lr": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return flat


def show(value: Any) -> str:
    """A setting as it is written on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(show(item) for item in value) if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class Standing:
    """A group among the others on its stream: its look, the interval of its A_B, its difference from the best."""

    group: Group
    look: Look
    interval: Interval | None
    """95 % interval of A_B; None where predictions are missing."""
    behind: Interval | None
    """A_B − that of the best on the same class orders and seeds; None for the best, or where it cannot be computed."""
    is_best: bool

    @property
    def tied(self) -> bool:
        """Whether the lead of the best over this group is within the noise."""
        return not self.is_best and (self.behind is None or self.behind.high >= 0)

    @property
    def ahead(self) -> bool:
        """Whether it has more than the best where both ran with the same class order and seed."""
        return self.behind is not None and self.behind.low > 0


def rank_groups(groups: Sequence[Group]) -> list[Standing]:
    """A standing for each group, in the order given. The best is the one with the highest mean of A_B."""
    best = max(groups, key=lambda group: group.last.mean)
    bootstrap = Bootstrap([run for group in groups for run in group.runs])
    found = []
    for group, look in zip(groups, assign_looks([group.first.method for group in groups]), strict=True):
        behind = None if group is best else bootstrap.difference(paired(group.runs, best.runs))
        found.append(Standing(group, look, bootstrap.mean(group.runs), behind, group is best))
    return found


def stream_titles(streams: Sequence[Stream]) -> list[str]:
    """A title for each stream; fewer training pictures, and choices that distinguish two streams, are named."""
    plain, options = [], [flatten(json.loads(rest)) for *_, rest in streams]
    for (data, tasks, backbone, _), own in zip(streams, options, strict=True):
        few = f", {own['shots']} per class" if own.get("shots") else ""
        few += f", {own['hold_out']} held-out training pictures per class" if own.get("hold_out") else ""
        plain.append(f"{data}{few}, {tasks} task{'s' * (tasks != 1)}, {backbone}")
    titles = []
    for name, own in zip(plain, options, strict=True):
        twins = [twin for twin, title in zip(options, plain, strict=True) if title == name]
        keys = sorted({key for twin in twins for key in {*twin, *own} if twin.get(key) != own.get(key)})
        titles.append(f"{name}{''.join(f', {key} {show(own.get(key))}' for key in keys)}")
    return titles


@dataclass(frozen=True)
class Line:
    """One line of the table on a terminal; `group` is None where every run of it failed."""

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
        label, tasks, group = printable(line.label), str(line.tasks or "—"), line.group
        runs = (str(len(group.runs)) if group else "0") + (f" (+{line.failed} failed)" if line.failed else "")
        last, average = (_cells(line, key)[: 1 + len(beside)] for key in ("last", "average"))
        seconds = f"{group.seconds:.1f}" if group else "—"
        whole.add_row(label, line.data, tasks, runs, *last, *average, seconds)
        stream = f"{line.data}, {tasks} tasks"
        heading = f"{title}: {stream}" if title else stream
        table = narrow.setdefault(stream, _table(heading, ["method"], ["", "ours", *beside, "runs", "seconds"]))
        table.add_row(label, "A_B", *last, runs, seconds)
        table.add_row("", "Ā", *average)
    fits = console.measure(whole, options=console.options.update(max_width=10_000)).maximum <= console.width
    console.print(*([whole] if fits else narrow.values()))
    backbones = {line.group.first.backbone for line in lines if line.group is not None} - {BACKBONE}
    if beside and backbones:
        console.print(f"The paper's numbers are of {BACKBONE}; these are of {', '.join(sorted(backbones))}.")


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for header in words:
        table.add_column(header, overflow="fold")
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _cells(line: Line, key: str) -> tuple[str, str, str]:
    """A number of the runs, that of the paper, and the difference."""
    ours, theirs = line.group.of(key) if line.group else None, getattr(line.paper, key, None)
    apart = "—" if ours is None or theirs is None else signed(ours.mean - theirs)
    return str(ours or "—"), "—" if theirs is None else f"{theirs:.2f}", apart

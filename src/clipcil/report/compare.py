"""Runs that differ in class order and seed alone, taken together; and what the paper printed for the same."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clipcil.paper import Printed, printed, read_table
from clipcil.report.runs import RunResult


class Spread(NamedTuple):
    """Mean and standard deviation (n − 1) over runs; no deviation for one run."""

    mean: float
    std: float | None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"


def spread(values: Iterable[float]) -> Spread:
    numbers = list(values)
    return Spread(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)


@dataclass(frozen=True)
class Group:
    """One method with one choice of settings on one stream of tasks: its runs, one for each class order and seed."""

    label: str
    runs: tuple[RunResult, ...]

    @property
    def first(self) -> RunResult:
        return self.runs[0]

    @property
    def stream(self) -> tuple[str, int, str, str]:
        return self.first.stream

    def spread(self, what: Callable[[RunResult], float]) -> Spread:
        return spread(what(run) for run in self.runs)

    @property
    def last(self) -> Spread:
        return self.spread(lambda run: run.last)

    @property
    def average(self) -> Spread:
        return self.spread(lambda run: run.average)

    @property
    def seconds(self) -> float:
        return self.spread(lambda run: run.seconds).mean

    @property
    def over(self) -> str:
        """What the runs differ in, such as `3 class orders`; a number of runs where it is both."""
        orders, seeds = len({run.order for run in self.runs}), len({run.seed for run in self.runs})
        if orders > 1 and seeds > 1:
            return f"{len(self.runs)} runs ({orders} class orders, {seeds} seeds)"
        return f"{orders} class orders" if orders > 1 else f"{seeds} seeds" if seeds > 1 else "1 run"

    def printed(self, table: str = "") -> Printed | None:
        """The paper's numbers for this method, these settings, this data and number of tasks; none for runs that were
        not measured on test pictures."""
        if self.first.run.get("hold_out"):
            return None
        return printed(self.first.method, self.first.settings, self.first.data, self.first.tasks, table)


def group_runs(runs: Sequence[RunResult]) -> list[Group]:
    """Groups in the order of the paper's table. A run that stands in two folders counts once."""
    by_key: dict[str, dict[tuple[str, int], RunResult]] = {}
    for run in runs:
        by_key.setdefault(run.key, {}).setdefault((run.order, run.seed), run)
    groups = [tuple(members[place] for place in sorted(members)) for members in by_key.values()]
    labels = _labels([members[0] for members in groups])
    return sorted((Group(label, members) for label, members in zip(labels, groups, strict=True)), key=_place)


def _place(group: Group) -> tuple[int, str, list[tuple[int, float, str]]]:
    """The paper's order of methods, then the others by name; variants by their numbers (0.5 before 10)."""
    known = [row.method for row in read_table("table1").rows]
    method = group.first.method
    parts = re.split(r"(\d+(?:\.\d+)?(?:e-?\d+)?)", group.label)
    words = [(0, float(part), "") if index % 2 else (1, 0.0, part) for index, part in enumerate(parts)]
    return known.index(method) if method in known else len(known), method, words


def title_of(method: str) -> str:
    """What the method is called in a table; its name where nobody knows it here."""
    from clipcil.methods.registry import methods

    kind = methods().get(method)
    return kind.title if kind is not None else method


def _labels(runs: Sequence[RunResult]) -> list[str]:
    """The method's title, with the settings by which a variant differs from others of its method on the same stream,
    device and precision among them.

    A value that more than half of three or more variants have goes without saying: a sweep of one setting after the
    other has one row with the title alone, and the others name what they change.
    """
    families: dict[Any, list[dict[str, Any]]] = {}
    for run in runs:
        families.setdefault((run.method, run.stream), []).append(_told_by(run))
    labels = []
    for run in runs:
        family, own, words = families[run.method, run.stream], _told_by(run), []
        for key in sorted({key for settings in family for key in settings}):
            alike = sum(settings.get(key) == own.get(key) for settings in family)
            if alike < len(family) and (len(family) < 3 or 2 * alike <= len(family)):
                words.append(f"{key}={show(own.get(key))}")
        labels.append(f"{title_of(run.method)} ({', '.join(words)})" if words else title_of(run.method))
    return labels


def _told_by(run: RunResult) -> dict[str, Any]:
    return {**{key: run.run.get(key) for key in ("device", "precision")}, **flatten(run.settings)}


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

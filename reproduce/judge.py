"""Which claims of the paper the evidence supports: rows found, differences judged, a verdict in words."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from pydantic import TypeAdapter
from scipy.special import stdtrit

from clipcil.errors import UserError
from clipcil.experiment.spec import RunSpec, method_settings
from clipcil.intervals import Interval
from clipcil.paper import Row, paper_result, read_table, table_names
from clipcil.report.compare import Group, Stream, flatten, group_runs, show
from clipcil.report.runs import RunRecord
from clipcil.report.statistics import Bootstrap, order_means, paired
from clipcil.settings import to_dict
from clipcil.storage import read_toml

Verdict = Literal["holds", "does not hold", "cannot be told", "not measured"]
Changes = dict[str, tuple[Any, Any]]
"""Settings that are others today, by their flat name: then and now."""
FEWEST_ORDERS = 3


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper as comparisons of rows: `better` against each of `worse`."""

    says: str
    better: str
    worse: tuple[str, ...]
    tasks: tuple[int, ...] = (10,)
    """The numbers of tasks for which the claim is judged."""
    margin: float | None = None
    """None: `better` has the higher A_B. A number: the two differ by at most this number."""
    datasets: tuple[str, ...] = ()
    """The datasets of the claim; empty: all."""
    paper_datasets: tuple[str, ...] = ()
    """The datasets for which the paper makes the claim; empty: all of the paper's."""


@cache
def read_claims() -> tuple[Claim, ...]:
    """The fourteen claims of `claims.toml`, in its order."""
    values = read_toml(Path(__file__).with_name("claims.toml"))
    return TypeAdapter(tuple[Claim, ...]).validate_python(values["claims"])


@dataclass(frozen=True)
class Part:
    """One comparison of a claim on one stream of tasks."""

    worse: str
    difference: Interval | None
    """A_B of the better − A_B of the worse, over class orders and test pictures; None without predictions."""
    over_orders: Interval | None
    """The same by Student's t over the class orders alone (the mean over the seeds of each)."""
    by_order: tuple[tuple[str, float], ...]
    """The difference in each run, by class order."""
    paper: float | None
    """The paper's difference on this dataset, else its mean over the datasets it has."""
    is_paper_mean: bool
    verdict: Verdict


@dataclass(frozen=True)
class ClaimResult:
    """A claim on one stream of tasks."""

    claim: Claim
    stream: Stream
    parts: tuple[Part, ...]

    @property
    def verdict(self) -> Verdict:
        """Holds where every part holds; does not hold where one does not."""
        said = {part.verdict for part in self.parts}
        if "does not hold" in said:
            return "does not hold"
        return "holds" if said == {"holds"} else "not measured" if said <= {"not measured"} else "cannot be told"


def judge_claims(runs: Sequence[RunRecord]) -> list[ClaimResult]:
    """Judge each claim of the paper on each stream that it is about and that has rows of the table `claims`.

    Where a preset has the value of a row, such as β = 1.5 on CUB-200, that row is the same run as the one it would be
    compared with, and is not part of the claim.
    """
    rows = {row.label: row for row in read_table("claims").rows}
    groups, found = rows_of_claims(runs), []
    for stream in sorted({stream for stream, _ in groups}):
        own = {label: group for (place, label), group in groups.items() if place == stream}
        bootstrap = Bootstrap([run for group in own.values() for run in group.runs])
        for claim in read_claims():
            if stream[1] in claim.tasks and (not claim.datasets or stream[0] in claim.datasets):
                better = own.get(claim.better)
                others = [rows[label] for label in claim.worse if better is None or own.get(label) is not better]
                parts = [_part(claim, stream, rows[claim.better], worse, own, bootstrap) for worse in others]
                found.append(ClaimResult(claim, stream, tuple(parts)))
    return sorted(found, key=lambda each: read_claims().index(each.claim))


def _part(
    claim: Claim, stream: Stream, better: Row, worse: Row, groups: Mapping[str, Group], bootstrap: Bootstrap
) -> Part:
    paper, is_mean = paper_difference(better, worse, stream[0], stream[1], claim.paper_datasets)
    sides = [groups[row.label].runs if row.label in groups else () for row in (better, worse)]
    pairs = paired(*sides)
    by_order = tuple((one.order, one.last - other.last) for one, other in pairs)
    difference, means = bootstrap.difference(pairs), order_means(by_order)
    verdict: Verdict = "cannot be told" if pairs else "not measured"
    if difference is not None and len(means) >= FEWEST_ORDERS:
        verdict = decide(difference, claim.margin)
    return Part(worse.label, difference, t_interval(means), by_order, paper, is_mean, verdict)


def t_interval(values: Sequence[float]) -> Interval | None:
    """Mean ± t·s/√n of a few runs; None for one.

    Examples:
        >>> print(t_interval([70.0, 72.0, 74.0]))
        72.00 [67.03, 76.97]
    """
    if len(values) < 2:
        return None
    quantile = round(float(stdtrit(len(values) - 1, 0.975)), 3)  # to three decimals, as printed tables have it
    mean, half = fmean(values), quantile * stdev(values) / sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def decide(difference: Interval, margin: float | None) -> Verdict:
    """The verdict on one difference: without a margin it has to lie above 0, else within ± the margin."""
    if margin is None:
        return "holds" if difference.low > 0 else "does not hold" if difference.high < 0 else "cannot be told"
    if max(-difference.low, difference.high) <= margin:
        return "holds"
    return "does not hold" if max(difference.low, -difference.high) > margin else "cannot be told"


def paper_difference(
    better: Row, worse: Row, data: str, tasks: int, among: Sequence[str] = ()
) -> tuple[float | None, bool]:
    """What the paper printed for this comparison: on this dataset, else the mean over its datasets (then True).

    `among`: those of its datasets that the mean is over. Default: all.
    """

    def on(name: str) -> float | None:
        one, other = (paper_result(row.method, row.settings_with(tasks), name, tasks) for row in (better, worse))
        same = one is not None and other is not None and (one.table, one.label) == (other.table, other.label)
        return None if one is None or other is None or same else one.last - other.last

    if (own := on(data)) is not None:
        return own, False
    every = among or {data for name in table_names() for data in read_table(name).datasets}
    known = [value for name in every if (value := on(name)) is not None]
    return (fmean(known), True) if known else (None, False)


def rows_of_claims(runs: Sequence[RunRecord]) -> dict[tuple[Stream, str], Group]:
    """`find_rows` for the table `claims`; no claim rests on runs measured on held-out training pictures."""
    groups = group_runs([run for run in runs if not run.run.get("hold_out")])
    return find_rows(read_table("claims").rows, groups)


def find_rows(rows: Sequence[Row], groups: Sequence[Group]) -> dict[tuple[Stream, str], Group]:
    """The group of each row on each stream of tasks, by the stream and the label of the row.

    Of several groups it is the one nearest to today's settings, then the one on the device and in the precision that
    the most rows of the stream have, then the one with the most runs.

    Rows that are compared must share the settings by which they do not differ. So a group that ran with other settings
    than today's is left out where another row on the stream ran with today's value of all of them.
    """
    fitting: dict[tuple[Stream, str], list[tuple[Group, Changes]]] = {}
    for group in groups:
        for row in rows:
            if (changes := since_then(group, row)) is not None:
                fitting.setdefault((group.stream, row.label), []).append((group, changes))
    rows_on = Counter(place for fits in fitting.values() for place in {_place(group) for group, _ in fits})

    def distance(fit: tuple[Group, Changes]) -> tuple[int, int, int]:
        group, changes = fit
        return len(changes), -rows_on[_place(group)], -len(group.runs)

    found = {place: min(fits, key=distance) for place, fits in fitting.items()}
    current = [(group.stream, flatten(group.first.settings)) for group, changes in found.values() if not changes]

    def superseded(stream: Stream, changes: Changes) -> bool:
        others = [own for place, own in current if place == stream]
        return bool(changes) and any(all(own.get(key) == now for key, (_, now) in changes.items()) for own in others)

    return {place: group for place, (group, changes) in found.items() if not superseded(place[0], changes)}


def _place(group: Group) -> tuple[Stream, Any, Any]:
    """The stream with device and precision, which are not part of it."""
    return group.stream, group.first.run.get("device"), group.first.run.get("precision")


def since_then(group: Group, row: Row) -> Changes | None:
    """What the group's settings were where today's are others; None where the group is not that row.

    The settings by which the rows of a method differ, such as `calibration` and `beta`, must be those that the row has
    today. Others, such as a learning rate, may have changed since the group ran.
    """
    first = group.first
    if first.method != row.method:
        return None
    try:
        today = _settings_today(row.method, tuple(row.settings_with(first.tasks).items()), first.data, first.backbone)
    except UserError:
        return None
    own = flatten(first.settings)
    changes = {key: (own[key], value) for key, value in today.items() if key in own and own[key] != value}
    return None if changes.keys() & _deciding(row.method) else changes


@cache
def _settings_today(method: str, chosen: tuple[tuple[str, Any], ...], data: str, backbone: str) -> dict[str, Any]:
    """Every setting that a run with these settings of a row would have today, by its flat name."""
    return flatten(to_dict(method_settings(RunSpec(method=method, data=data, backbone=backbone), dict(chosen))))


@cache
def _deciding(method: str) -> frozenset[str]:
    """The settings by which the rows of a method differ."""
    rows = read_table("claims").rows
    return frozenset(key for row in rows if row.method == method for key in row.decides)


def outdated(runs: Sequence[RunRecord]) -> list[str]:
    """A line for each row that ran with other settings than it would have today."""
    rows, lines = {row.label: row for row in read_table("claims").rows}, []
    for (stream, label), group in rows_of_claims(runs).items():
        if changes := since_then(group, rows[label]):
            said = ", ".join(f"{key} {show(then)} (today {show(now)})" for key, (then, now) in changes.items())
            lines.append(f"{label} on {stream[0]}, {stream[1]} tasks, ran with {said}")
    return lines

"""Which claims of the paper the evidence supports: rows found, differences judged, a verdict in words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import TypeAdapter

from clipcil.errors import UserError
from clipcil.experiment.spec import RunSpec, method_settings
from clipcil.intervals import Interval, t_interval
from clipcil.paper import Row, paper_result, read_table, table_names
from clipcil.report.compare import Group, flatten, group_runs, show
from clipcil.report.runs import RunRecord
from clipcil.report.statistics import Bootstrap, order_means, paired
from clipcil.settings import to_dict
from clipcil.storage import read_toml

Verdict = Literal["holds", "does not hold", "cannot be told", "not measured"]
Stream = tuple[str, int, str, str]
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
class Judged:
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


def judge(claims: Iterable[Claim], rows: Sequence[Row], groups: Mapping[tuple[Stream, str], Group]) -> list[Judged]:
    """Judge each claim on each stream that it is about.

    Args:
        claims: The claims.
        rows: What the labels in the claims mean.
        groups: The runs of each row on each stream, by the stream and the label of the row.

    Returns:
        One judgement for each claim and stream of its numbers of tasks. Where a preset has the value of a row, such as
        β = 1.5 on CUB-200, that row is the same run as the one it would be compared with, and is no part of the claim.
    """
    by_label = {row.label: row for row in rows}
    streams = sorted({stream for stream, _ in groups})
    bootstrap = {
        stream: Bootstrap([run for (own, _), group in groups.items() if own == stream for run in group.runs])
        for stream in streams
    }
    found = []
    for claim in claims:
        for stream in streams:
            if stream[1] in claim.tasks and (not claim.datasets or stream[0] in claim.datasets):
                better, own = by_label[claim.better], groups.get((stream, claim.better))
                others = [label for label in claim.worse if own is None or groups.get((stream, label)) is not own]
                parts = [_part(claim, stream, (better, by_label[each]), groups, bootstrap[stream]) for each in others]
                found.append(Judged(claim, stream, tuple(parts)))
    return found


def _part(
    claim: Claim,
    stream: Stream,
    rows: tuple[Row, Row],
    groups: Mapping[tuple[Stream, str], Group],
    bootstrap: Bootstrap,
) -> Part:
    sides = [groups.get((stream, row.label)) for row in rows]
    paper, is_mean = paper_difference(*rows, stream[0], stream[1], claim.paper_datasets)
    if sides[0] is None or sides[1] is None or not (pairs := paired(sides[0].runs, sides[1].runs)):
        return Part(rows[1].label, None, None, (), paper, is_mean, "not measured")
    by_order = tuple((one.order, one.last - other.last) for one, other in pairs)
    difference = bootstrap.difference(pairs)
    means = order_means(by_order)
    verdict: Verdict = "cannot be told"
    if difference is not None and len(means) >= FEWEST_ORDERS:
        verdict = decide(difference, claim.margin)
    return Part(rows[1].label, difference, t_interval(means), by_order, paper, is_mean, verdict)


def decide(difference: Interval, margin: float | None) -> Verdict:
    """The verdict for one comparison.

    Args:
        difference: A_B of the better − A_B of the worse, with its 95 % interval.
        margin: None: the claim is that it is above 0. A number: that it lies within ± this.

    Example:
        >>> decide(Interval(2.0, 0.5, 3.5), None), decide(Interval(2.0, -0.5, 4.5), None)
        ('holds', 'cannot be told')
        >>> decide(Interval(2.0, 0.5, 3.5), 3.0), decide(Interval(5.0, 3.5, 6.5), 3.0)
        ('cannot be told', 'does not hold')
    """
    if margin is None:
        return "holds" if difference.low > 0 else "does not hold" if difference.high < 0 else "cannot be told"
    if -margin <= difference.low and difference.high <= margin:
        return "holds"
    return "does not hold" if difference.low > margin or difference.high < -margin else "cannot be told"


def paper_difference(
    better: Row, worse: Row, data: str, tasks: int, among: Sequence[str] = ()
) -> tuple[float | None, bool]:
    """What the paper printed for this comparison: on this dataset, else the mean over its datasets (then True).

    `among`: those of its datasets that the mean is over. Default: all.
    """

    def on(name: str) -> float | None:
        one, other = (paper_result(row.method, row.settings_with(tasks), name, tasks) for row in (better, worse))
        same = one is not None and other is not None and (one.table, one.label) == (other.table, other.label)
        if one is None or other is None or one.last is None or other.last is None or same:
            return None
        return one.last - other.last

    if (own := on(data)) is not None:
        return own, False
    known = [value for name in among or _paper_datasets() if (value := on(name)) is not None]
    return (fmean(known), True) if known else (None, False)


def _paper_datasets() -> list[str]:
    tables = [read_table(name) for name in table_names()]
    return list(dict.fromkeys(data for table in tables for row in table.rows if row.last for data in table.datasets))


def judge_claims(runs: Sequence[RunRecord]) -> list[Judged]:
    """The paper's claims, judged by those of `runs` that are rows of the table `claims`, on test pictures."""
    table = read_table("claims")
    return judge(read_claims(), table.all_rows(), find_rows(table.all_rows(), _measured_on_test(runs)))


def find_rows(rows: Sequence[Row], groups: Sequence[Group]) -> dict[tuple[Stream, str], Group]:
    """The group of each row on each stream of tasks; of several the one nearest to today's settings, then the one on
    the device and in the precision that the most rows of the stream have, then the one with the most runs.

    Rows that are compared must share the settings by which they do not differ. So a group that ran with other settings
    than today's is left out where another row on the stream ran with today's value of all of them.
    """
    fitting: dict[tuple[Stream, str], list[tuple[Group, dict[str, tuple[Any, Any]]]]] = {}
    for group in groups:
        for row in rows:
            if (differ := since_then(group, row)) is not None:
                fitting.setdefault((group.stream, row.label), []).append((group, differ))
    rows_on = Counter(
        (place[0], own) for place, fits in fitting.items() for own in {_machine(group) for group, _ in fits}
    )

    def distance(fit: tuple[Group, dict[str, Any]]) -> tuple[int, int, int]:
        group, differ = fit
        return len(differ), -rows_on[group.stream, _machine(group)], -len(group.runs)

    found = {place: min(fits, key=distance) for place, fits in fitting.items()}
    current = [group for group, differ in found.values() if not differ]

    def superseded(stream: Stream, differ: dict[str, tuple[Any, Any]]) -> bool:
        others = [flatten(group.first.settings) for group in current if group.stream == stream]
        return bool(differ) and any(all(own.get(key) == now for key, (_, now) in differ.items()) for own in others)

    return {place: group for place, (group, differ) in found.items() if not superseded(place[0], differ)}


def _machine(group: Group) -> str:
    """Device and precision, which are no part of a stream."""
    return f"{group.first.run.get('device')}, {group.first.run.get('precision')}"


def since_then(group: Group, row: Row) -> dict[str, tuple[Any, Any]] | None:
    """What the group's settings were where today's are others; None where the group is not that row.

    The settings by which the rows of a method differ, such as `calibration` and `beta`, must be those that the row has
    today. Others, such as a learning rate, may have changed since the group ran.
    """
    first = group.first
    if first.method != row.method:
        return None
    try:
        today = _settings_today(row.method, json.dumps(row.settings_with(first.tasks)), first.data, first.backbone)
    except UserError:
        return None
    own = flatten(first.settings)
    differ = {key: (own[key], value) for key, value in today.items() if key in own and own[key] != value}
    return None if differ.keys() & _deciding(row.method) else differ


@cache
def _settings_today(method: str, chosen: str, data: str, backbone: str) -> dict[str, Any]:
    """Every setting that a run would have today, by its flat name. `chosen`: those of the row, as JSON."""
    settings = method_settings(RunSpec(method=method, data=data, backbone=backbone), json.loads(chosen))
    return flatten(to_dict(settings))


def outdated(runs: Sequence[RunRecord]) -> list[str]:
    """A line for each row that ran with other settings than it would have today."""
    rows = read_table("claims").all_rows()
    lines = []
    for (stream, label), group in find_rows(rows, _measured_on_test(runs)).items():
        differ = since_then(group, next(row for row in rows if row.label == label))
        if differ:
            said = ", ".join(f"{key} {show(then)} (today {show(now)})" for key, (then, now) in differ.items())
            lines.append(f"{label} on {stream[0]}, {stream[1]} tasks, ran with {said}")
    return lines


def _measured_on_test(runs: Sequence[RunRecord]) -> list[Group]:
    """Runs measured on held-out training pictures are for choosing settings: no claim rests on them."""
    return group_runs([run for run in runs if not run.run.get("hold_out")])


@cache
def _deciding(method: str) -> frozenset[str]:
    """The settings by which the rows of a method differ."""
    rows = read_table("claims").all_rows()
    return frozenset(key for row in rows if row.method == method for key in row.decides)

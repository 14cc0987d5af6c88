"""Judging the paper's claims: paired differences, their intervals, and a verdict in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from clipcil.intervals import Interval, t_interval
from clipcil.paper import Claim, Row, paper_result, read_table, table_names
from clipcil.report.compare import Group
from clipcil.report.statistics import Bootstrap, order_means, paired

Verdict = Literal["holds", "does not hold", "cannot be told", "not measured"]
Stream = tuple[str, int, str, str]
FEWEST_ORDERS = 3


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


def summary(judged: Sequence[Judged], name: Callable[[Stream], str]) -> list[tuple[str, str]]:
    """For each claim its sentence and its verdicts, such as `holds (emoji, 10 tasks)`; each claim has a line."""
    lines = []
    for claim in read_table("claims").claims:
        own = [each for each in judged if each.claim == claim]
        said = [f"{each.verdict} ({name(each.stream)})" for each in own if each.verdict != "not measured"]
        lines.append((claim.says, "; ".join(said) or "not measured"))
    return lines

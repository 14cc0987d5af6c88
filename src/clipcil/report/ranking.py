"""The methods on one stream of tasks, ranked: intervals, distance from the best, and the finding in one sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from clipcil.intervals import Interval
from clipcil.report.compare import Group, flatten, show
from clipcil.report.statistics import Bootstrap, paired
from clipcil.report.style import Look, assign_looks


@dataclass(frozen=True)
class Entry:
    """A group with its look, the 95 % interval of its A_B, and its paired difference from the best."""

    group: Group
    look: Look
    interval: Interval | None
    """None where predictions are missing."""
    behind: Interval | None
    """A_B − that of the best on the same class orders and seeds; None for the best, or where it cannot be computed."""
    is_best: bool

    @property
    def tied(self) -> bool:
        """Whether the best is not better than it by more than the noise."""
        return not self.is_best and (self.behind is None or self.behind.high >= 0)


def rank(groups: Sequence[Group]) -> list[Entry]:
    """An entry for each group, in the order given. The best is the one with the highest mean of A_B."""
    best = max(groups, key=lambda group: group.last.mean)
    bootstrap = Bootstrap([run for group in groups for run in group.runs])
    entries = []
    for group, look in zip(groups, assign_looks([group.first.method for group in groups]), strict=True):
        behind = None if group is best else bootstrap.difference(paired(group.runs, best.runs))
        entries.append(Entry(group, look, bootstrap.mean(group.runs), behind, group is best))
    return entries


def leader(entries: Sequence[Entry]) -> Entry:
    return next(entry for entry in entries if entry.is_best)


def is_clear(entries: Sequence[Entry]) -> bool:
    """Whether the best is better than every other by more than the noise."""
    return len(entries) > 1 and not any(entry.tied for entry in entries)


def finding(entries: Sequence[Entry], where: str) -> str:
    """One sentence: which method is best on this stream, and which cannot be told from it."""
    best = leader(entries)
    group, interval = best.group, best.interval
    noise = f" (95 % interval {interval.low:.1f} to {interval.high:.1f}; {group.over})" if interval else ""
    if len(entries) == 1:
        return f"{group.label} on {where}: A_B {group.last.mean:.1f} %{noise}."
    said = f"{group.label} has the highest A_B on {where}: {group.last.mean:.1f} %{noise}"
    tied = sorted((entry for entry in entries if entry.tied), key=lambda entry: -entry.group.last.mean)
    if interval is None:
        why = "predictions are missing, or not all of the same pictures"
        return f"{said}; how much of its lead is noise cannot be told: {why}."
    if not tied:
        others = f"the other {len(entries) - 1}" if len(entries) > 2 else "the other method"
        return f"{said}, ahead of {others} by more than the noise."
    names = [f"{entry.group.label} ({entry.group.last.mean:.1f} %)" for entry in tied[:3]]
    rest = f" and {len(tied) - 3} more" if len(tied) > 3 else ""
    ahead = [entry.group.label for entry in tied if entry.behind is not None and entry.behind.low > 0]
    more = f"; where both ran with the same class order and seed, {', '.join(ahead)} had more" if ahead else ""
    return f"{said}, but it cannot be told from {', '.join(names)}{rest}{more}."


def stream_titles(streams: Sequence[tuple[str, int, str, str]]) -> list[str]:
    """What each stream is called; fewer training pictures, and choices that tell two of them apart, are named."""
    options = [json.loads(rest) for *_, rest in streams]
    shots = [
        (f", {own['shots']} per class" if own.get("shots") else "")
        + (f", {own['hold_out']} held-out training pictures per class" if own.get("hold_out") else "")
        for own in options
    ]
    plain = [
        f"{data}{few}, {tasks} task{'s' * (tasks != 1)}, {backbone}"
        for (data, tasks, backbone, _), few in zip(streams, shots, strict=True)
    ]
    titles = []
    for name, stream in zip(plain, streams, strict=True):
        twins = [flatten(json.loads(other[3])) for other, title in zip(streams, plain, strict=True) if title == name]
        own = flatten(json.loads(stream[3]))
        keys = sorted({key for twin in twins for key in {*twin, *own} if twin.get(key) != own.get(key)})
        titles.append(f"{name}{''.join(f', {key} {show(own.get(key))}' for key in keys)}")
    return titles

"""Which runs a claim of the paper rests on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from clipcil.errors import UserError
from clipcil.experiment.spec import RunSpec, method_settings
from clipcil.paper import Row, read_table
from clipcil.report.claims import Judged, Stream, judge
from clipcil.report.compare import Group, flatten, group_runs, show
from clipcil.report.runs import RunResult
from clipcil.settings import to_dict


def judge_claims(runs: Sequence[RunResult]) -> list[Judged]:
    """The paper's claims, judged by those of `runs` that are rows of the table `claims`, on test pictures."""
    table = read_table("claims")
    return judge(table.claims, table.all_rows(), find_rows(table.all_rows(), _measured_on_test(runs)))


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
    return flatten(_plain(to_dict(settings)))


def outdated(runs: Sequence[RunResult]) -> list[str]:
    """A line for each row that ran with other settings than it would have today."""
    rows = read_table("claims").all_rows()
    lines = []
    for (stream, label), group in find_rows(rows, _measured_on_test(runs)).items():
        differ = since_then(group, next(row for row in rows if row.label == label))
        if differ:
            said = ", ".join(f"{key} {show(then)} (today {show(now)})" for key, (then, now) in differ.items())
            lines.append(f"{label} on {stream[0]}, {stream[1]} tasks, ran with {said}")
    return lines


def _measured_on_test(runs: Sequence[RunResult]) -> list[Group]:
    """Runs measured on held-out training pictures are for choosing settings: no claim rests on them."""
    return group_runs([run for run in runs if not run.run.get("hold_out")])


@cache
def _deciding(method: str) -> frozenset[str]:
    """The settings by which the rows of a method differ."""
    rows = read_table("claims").all_rows()
    return frozenset(key for row in rows if row.method == method for key in row.decides)


def _plain(value: Any) -> Any:
    """As JSON gives it back: lists for tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value

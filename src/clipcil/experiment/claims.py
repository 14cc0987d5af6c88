"""Which runs a claim of the paper rests on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clipcil.errors import UserError
from clipcil.experiment.spec import RunSpec, method_settings
from clipcil.paper import Row, read_table
from clipcil.report.claims import Judged, Stream, judge
from clipcil.report.compare import Group, flatten, group_runs
from clipcil.report.runs import RunResult
from clipcil.settings import to_dict


def judge_claims(runs: Sequence[RunResult]) -> list[Judged]:
    """The paper's claims, judged by those of `runs` that are rows of the table `claims` with today's settings."""
    table = read_table("claims")
    rows, groups = table.all_rows(), group_runs(runs)
    found: dict[tuple[Stream, str], Group] = {}
    for group in groups:
        for row in rows:
            if is_row(group, row):
                found[group.stream, row.label] = group
    return judge(table.claims, rows, found)


def is_row(group: Group, row: Row) -> bool:
    """Whether the group ran what the row asks for: its settings over the preset of the dataset and the backbone.

    A setting that did not exist yet when the group ran is passed over.
    """
    first = group.first
    if first.method != row.method:
        return False
    spec = RunSpec(method=row.method, data=first.data, backbone=first.backbone)
    try:
        wanted = flatten(_plain(to_dict(method_settings(spec, row.settings))))
    except UserError:
        return False
    own = flatten(first.settings)
    return all(own[key] == value for key, value in wanted.items() if key in own)


def _plain(value: Any) -> Any:
    """As JSON gives it back: lists for tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value

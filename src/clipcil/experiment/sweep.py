"""Varying one option: the runs of a sweep, and the points of its curve."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipcil.errors import UserError, nearest
from clipcil.experiment.bench import Finished
from clipcil.experiment.grid import (
    Grid,
    Planned,
    check_settings,
    data_options,
    data_roots,
    has_setting,
    known_datasets,
    resolve,
)
from clipcil.experiment.spec import RunSpec
from clipcil.methods.registry import find_method
from clipcil.paper import read_table
from clipcil.report.compare import Group, Spread, group_runs
from clipcil.settings import build, parse_words, within

SYMBOLS = {"M": "prompt_length", "β": "beta", "λ": "ortho", "lambda": "ortho"}
"""The paper's names of three settings of DMC-OT."""

OWN = {"method", "data", "data_root", "data_options", "seed"}
"""Choices outside the method that a sweep has its own words for."""


@dataclass(frozen=True)
class Point:
    """What one value came to on one dataset, over the seeds that went well."""

    data: str
    value: str
    last: Spread
    average: Spread
    seconds: float
    seeds: int


def plan_sweep(method: str, key: str, values: Sequence[str], grid: Grid, out: Path) -> list[Planned]:
    """A run for each dataset, value and seed; the label of each is its value.

    `key` is a setting of the method, or a choice outside it such as tasks or shots. Without values, those of the
    sensitivity study are taken.
    """
    within("seeds", grid.seeds, 1, 1000)
    config = find_method(method).Config()
    key = SYMBOLS.get(key, key) if not has_setting(config, key) else key
    outside = key in {item.name for item in dataclasses.fields(RunSpec)} - OWN
    if not has_setting(config, key) and not outside:
        known = [item.name for item in dataclasses.fields(config)]
        raise UserError(f"{method} has no setting '{key}'{nearest(key, known)}")
    chosen = list(values) or [f"{value:g}" for value in study_values(key)]
    if len(set(chosen)) < 2:
        raise UserError(f"a sweep needs at least two values of '{key}'; write them one after the other")
    check_settings(grid.settings, [method])
    data = known_datasets(grid.data or ("emoji",))
    roots, options = data_roots(grid.roots, data), data_options(grid.data_settings, data)
    planned = []
    for name in data:
        for value in dict.fromkeys(chosen):
            for seed in range(grid.seeds):
                where: dict[str, Any] = {"method": method, "data": name, "data_root": roots[name], "seed": seed}
                where |= {"data_options": options[name], **({key: value} if outside else {})}
                spec = build(RunSpec, {**grid.run, **where})
                settings: dict[str, Any] = {} if outside else parse_words([f"{key}={value}"])
                planned.append(resolve(value, spec, settings, grid.settings, out))
    for each in planned:
        if each.problem:  # one value that does not fit is a slip of the hand, not a result
            raise UserError(each.problem)
    return planned


def study_values(key: str) -> tuple[float, ...]:
    """The values that the sensitivity study takes for a setting."""
    return next((sweep.values for sweep in read_table("sensitivity").sweeps if sweep.key == key), ())


def points_of(finished: Sequence[Finished]) -> list[Point]:
    """A point for each dataset and value with at least one run that went well, in the order of the sweep."""
    together: dict[tuple[str, str], list[Finished]] = {}
    for each in finished:
        together.setdefault((each.planned.spec.data, each.planned.label), []).append(each)
    points = []
    for (data, value), members in together.items():
        results = [member.result for member in members if member.result is not None]
        if results:
            group = Group(value, group_runs(results)[0].runs)
            points.append(Point(data, value, group.last, group.average, group.seconds, len(results)))
    return points

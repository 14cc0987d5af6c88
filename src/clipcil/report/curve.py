"""The curve of a sweep as a PNG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clipcil.errors import UserError
from clipcil.files import whole_file
from clipcil.reading import read_bytes
from clipcil.report.compare import Spread
from clipcil.report.style import figure_style, series_looks

MADE_BY = "clipcil sweep"
"""Who made the file, in its metadata: by this a curve of ours is told from a picture of the user."""
FORMATS = ("png", "svg", "pdf")


@dataclass(frozen=True)
class Curve:
    """One dataset: the value, A_B and Ā of each point."""

    name: str
    points: list[tuple[str, Spread, Spread]]


def save_sweep(curves: Sequence[Curve], title: str, key: str, path: Path) -> None:
    """A_B drawn, Ā dashed, ± a standard deviation where there are seeds.

    Values that are numbers stand in the order of size at equal distances: the values of such studies grow by factors,
    and zero, which no logarithmic axis has, is often among them.
    """
    values = list(dict.fromkeys(value for curve in curves for value, _, _ in curve.points))
    values.sort(key=_number)
    place = {value: index for index, value in enumerate(values)}
    with figure_style("light") as pyplot:
        figure, axes = pyplot.subplots(figsize=(5.6, 3.8))
        for curve, look in zip(curves, series_looks(len(curves)), strict=True):
            last = [(place[value], spread) for value, spread, _ in curve.points]
            average = [(place[value], spread) for value, _, spread in curve.points]
            for points, dash, name in ((sorted(last), "-", "A_B"), (sorted(average), "--", "Ā")):
                across = [x for x, _ in points]
                means = [spread.mean for _, spread in points]
                label = f"{curve.name}, {name}" if len(curves) > 1 else name
                axes.plot(across, means, dash, color=look.light, marker=look.marker, label=label)
                low = [spread.mean - (spread.std or 0) for _, spread in points]
                high = [spread.mean + (spread.std or 0) for _, spread in points]
                axes.fill_between(across, low, high, color=look.light, alpha=0.15, linewidth=0)
        axes.set_xticks(range(len(values)), values, rotation=30 if max(map(len, values)) > 6 else 0)
        axes.set_xlabel(key)
        axes.set_ylabel("accuracy, %")
        axes.set_title(title)
        figure.legend(loc="outside lower center", ncols=min(2 * len(curves), 4))
        check_plot(path)
        with whole_file(path) as part:
            figure.savefig(part, format=path.suffix[1:].lower(), metadata={"Creator": MADE_BY})


def check_plot(path: Path) -> None:
    """Refuse a file that no curve can be written to, and one that is not a curve of an earlier sweep.

    Raises:
        UserError: Another ending than those of `FORMATS`, or somebody's file is there.
    """
    if path.suffix[1:].lower() not in FORMATS:
        raise UserError(f"{path} is no name for a curve; it ends in {', '.join(f'.{name}' for name in FORMATS)}")
    if os.path.lexists(path) and (not path.is_file() or MADE_BY.encode() not in read_bytes(path, 2**26)):
        raise UserError(f"{path} is there already and is no curve of clipcil; name another file with --plot")


def _number(value: str) -> tuple[int, float, str]:
    """Numbers by size, then words as they come."""
    try:
        return 0, float(value), ""
    except ValueError:
        return 1, 0.0, ""

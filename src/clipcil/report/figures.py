"""The figures of a report. Each function draws in the theme it is given and returns a PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipcil.report.compare import Group
from clipcil.report.runs import WHOLE
from clipcil.report.style import DASHES, INKS, MARKERS, Look, Theme, figure_style, look_of, series_look

MOST_LINES = 12
WIDTH = 4.8
"""Inches: narrow enough for its letters to be read on a phone."""


def best(groups: Sequence[Group], most: int = MOST_LINES) -> list[Group]:
    """The groups to draw, by A_B where there are too many, in the order given."""
    chosen = sorted(groups, key=lambda group: -group.last.mean)[:most]
    return [group for group in groups if group in chosen]


def accuracy(groups: Sequence[Group], theme: Theme) -> bytes:
    """A_k after each task, a line for each method, ± a standard deviation over seeds."""
    groups = best(groups)
    with figure_style(theme) as pyplot:
        figure, axes = pyplot.subplots(figsize=(WIDTH, 3.4 + 0.2 * -(-len(groups) // 2)))
        for group, (look, dash) in zip(groups, _looks(groups), strict=True):
            values = np.array([run.values["after"] for run in group.runs])
            across = np.arange(1, values.shape[1] + 1)
            mean, std = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
            colour = look.colour(theme)
            own = group.first.method in ("dmc", "dmc-ot")
            axes.plot(across, mean, dash, color=colour, marker=look.marker, label=group.label, zorder=3 if own else 2)
            axes.fill_between(across, mean - std, mean + std, color=colour, alpha=0.18, linewidth=0)
        axes.set_xlabel("tasks learnt")
        axes.set_ylabel("accuracy over all classes seen, %")
        axes.set_xticks(across if len(across) <= 12 else across[:: -(-len(across) // 10)])
        axes.set_ylim(0, 1.04 * axes.get_ylim()[1])
        long = max(len(group.label) for group in groups) > 24
        figure.legend(loc="outside lower center", ncols=1 if long else 2)
        return _png(figure)


def matrix(group: Group, theme: Theme) -> bytes:
    """R[k, i]: accuracy on task i after learning task k, the mean over seeds."""
    values = [[np.nan if v is None else v for v in row] for run in group.runs for row in run.values["matrix"]]
    mean = np.array(values, dtype=np.float64).reshape(len(group.runs), group.first.tasks, -1).mean(0)
    return _heat(mean, "task measured", "after learning task", "accuracy, %", theme)


def confusion(group: Group, theme: Theme) -> bytes:
    """Of the test pictures of a task, the share taken for a class of each task, at the end."""
    counts = np.sum([run.values["between_tasks"] for run in group.runs], axis=0, dtype=np.float64)
    share = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return _heat(share, "taken for a class of task", "pictures of task", "share, %", theme)


def forgetting(groups: Sequence[Group], theme: Theme) -> bytes:
    """Best accuracy so far − accuracy at the end, the mean over tasks but the last."""
    groups = best(groups, 2 * MOST_LINES)
    with figure_style(theme) as pyplot:
        figure, axes = pyplot.subplots(figsize=(WIDTH, 0.9 + _bar(groups) * len(groups)))
        for place, (group, (look, _)) in enumerate(zip(groups, _looks(groups), strict=True)):
            spread = group.spread(lambda run: float(run.values["forgetting"]))
            colour = look.colour(theme)
            axes.barh(place, spread.mean, color=colour, height=0.65)
            if spread.std is not None:
                axes.errorbar(spread.mean, place, xerr=spread.std, color=INKS[theme].text, capsize=3, linewidth=1.2)
            edge = max(spread.mean + (spread.std or 0), 0)
            axes.annotate(f"{spread.mean:.1f}", (edge, place), (5, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(groups)), [_wrap(group.label) for group in groups])
        axes.tick_params(axis="y", labelcolor=INKS[theme].text, length=0)
        axes.invert_yaxis()
        axes.margins(x=0.14)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("forgetting, percentage points")
        return _png(figure)


def has_drift(group: Group) -> bool:
    return any(value for run in group.runs for value in run.values.get("drift", []))


def drift(groups: Sequence[Group], theme: Theme) -> bytes:
    """How far the stored means lie from the true ones after each task, before and after calibration."""
    groups = best([group for group in groups if has_drift(group)], MOST_LINES // 2)
    with figure_style(theme) as pyplot:
        height = 4.6 + 0.22 * len(groups)
        figure, panels = pyplot.subplots(2, 1, figsize=(WIDTH, height), sharex=True)
        for panel, key, name in zip(panels, ("cosine", "w2"), ("1 − cosine of means", "W₂ of Gaussians"), strict=True):
            for group, (look, _) in zip(groups, _looks(groups), strict=True):
                ink = look.colour(theme)
                # A ring around the dot: both can be seen where calibration changed nothing.
                rings, dots = {"ls": ":", "mfc": INKS[theme].page, "ms": 9}, {"ls": "-", "ms": 4}
                for when, how in (("before", rings), ("after", dots)):
                    across, mean = _drift_line(group, f"{key}_{when}")
                    label = f"{group.label}: {when} calibration" if key == "cosine" else None
                    panel.plot(across, mean, color=ink, marker=look.marker, label=label, **how)
            panel.set_ylabel(name)
            panel.set_ylim(0, 1.06 * panel.get_ylim()[1])
        panels[-1].set_xlabel("tasks learnt")
        panels[-1].xaxis.get_major_locator().set_params(integer=True)
        figure.legend(loc="outside lower center", ncols=1)
        return _png(figure)


def seconds(groups: Sequence[Group], theme: Theme) -> bytes:
    """Where the time went, the mean over seeds."""
    groups = best(groups, 2 * MOST_LINES)
    parts = [_phases(group) for group in groups]
    names = list(dict.fromkeys(name for phases in parts for name in phases))
    with figure_style(theme) as pyplot:
        height = 1.2 + _bar(groups) * len(groups) + 0.2 * -(-len(names) // 3)
        figure, axes = pyplot.subplots(figsize=(WIDTH, height))
        left = np.zeros(len(groups))
        for index, name in enumerate(names):
            widths = np.array([phases.get(name, 0.0) for phases in parts])
            colour = series_look(index).colour(theme)
            edge = {"edgecolor": INKS[theme].page, "linewidth": 0.6}
            axes.barh(range(len(groups)), widths, left=left, color=colour, height=0.65, label=name, **edge)
            left += widths
        for place, total in enumerate(left):
            axes.annotate(f"{total:.1f}", (total, place), (5, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(groups)), [_wrap(group.label) for group in groups])
        axes.tick_params(axis="y", labelcolor=INKS[theme].text, length=0)
        axes.invert_yaxis()
        axes.margins(x=0.14)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds")
        figure.legend(loc="outside lower center", ncols=3)
        return _png(figure)


def _phases(group: Group) -> dict[str, float]:
    """Seconds of what lies inside learning, then of the rest of it, then of the other phases."""
    total: dict[str, float] = {}
    for run in group.runs:
        for name, value in run.timing.get("seconds", {}).items():
            total[name] = total.get(name, 0.0) + value / len(group.runs)
    inner = {name: value for name, value in total.items() if name not in WHOLE}
    rest = {"rest of learning": max(0.0, total.get("learning", 0.0) - sum(inner.values()))}
    return {**inner, **rest, **{name: total[name] for name in WHOLE if name in total and name != "learning"}}


def _drift_line(group: Group, key: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    rows = [[step[key] if step else np.nan for step in run.values["drift"]] for run in group.runs]
    mean = np.array(rows, dtype=np.float64).mean(0)
    known = ~np.isnan(mean)
    return np.arange(1, len(mean) + 1)[known], mean[known]


def _heat(values: NDArray[np.float64], across: str, down: str, what: str, theme: Theme) -> bytes:
    """Cells with their numbers where there is room; cividis reads the same with and without colour blindness."""
    count = len(values)
    with figure_style(theme) as pyplot:
        figure, axes = pyplot.subplots(figsize=(WIDTH, 4.6))
        image = axes.imshow(np.ma.masked_invalid(values), cmap="cividis", vmin=0, vmax=100, aspect="auto")
        axes.grid(visible=False)
        for side in axes.spines.values():
            side.set_visible(False)
        step = 1 if count <= 12 else 2
        ticks = range(0, count, step)
        axes.set_xticks(ticks, [str(tick + 1) for tick in ticks])
        axes.set_yticks(ticks, [str(tick + 1) for tick in ticks])
        axes.set_xlabel(across)
        axes.set_ylabel(down)
        if count <= 12:
            for (row, column), value in np.ndenumerate(values):
                if not np.isnan(value) and round(value) > 0:
                    ink = "#000000" if value > 55 else "#ffffff"
                    axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=9)
        bar = figure.colorbar(image, ax=axes, label=what, fraction=0.045, pad=0.02)
        bar.outline.set_visible(False)
        return _png(figure)


def _looks(groups: Sequence[Group]) -> list[tuple[Look, str]]:
    """Colour, marker and line of each. Variants of one method among others share its colour and differ in line and
    marker; where all are variants of one method, colour can tell them apart better.
    """
    names = [group.first.method for group in groups]
    if len(set(names)) == 1 and len(names) > 1:
        return [(series_look(index), "-") for index in range(len(groups))]
    looks = []
    for index, name in enumerate(names):
        variant = names[:index].count(name)
        look = look_of(name)
        marker = look.marker if not variant else MARKERS[variant % len(MARKERS)]
        looks.append((look._replace(marker=marker), DASHES[variant % len(DASHES)]))
    return looks


def _bar(groups: Sequence[Group]) -> float:
    """Inches for one bar: room for the lines of the longest label."""
    return 0.17 + 0.15 * max(1 + _wrap(group.label).count("\n") for group in groups)


def _wrap(label: str, width: int = 22) -> str:
    import textwrap

    return textwrap.fill(label, width)


def _png(figure: Any) -> bytes:
    held = io.BytesIO()
    figure.savefig(held, format="png", metadata={"Software": None})
    return held.getvalue()

"""The figures of a report. Each function draws in the theme it is given and returns a PNG with its points."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clipcil.report.compare import Group
from clipcil.report.ranking import Entry
from clipcil.report.runs import WHOLE
from clipcil.report.style import INKS, Theme, figure_style, series_looks

MOST_SCORES, MOST_BARS, MOST_LINES, MOST_DRIFTS = 36, 24, 12, 6
"""How many methods a figure shows; of more, the best by A_B."""
WIDTH = 4.8
"""Width in inches: narrow enough for its text to be legible on a phone."""
LEGEND = 52
"""Characters of a line of a legend, which is as wide as the figure."""


class Drawn(NamedTuple):
    """A PNG, and what to say where the pointer rests."""

    png: bytes
    points: list[tuple[float, float, str]]
    """Place from the left and from the top, in percent of the figure, and a text."""


class Tips:
    """Collects points in the coordinates of their axes; they become places when the figure is drawn."""

    def __init__(self) -> None:
        self.points: list[tuple[Any, float, float, str]] = []

    def add(self, axes: Any, x: float, y: float, text: str) -> None:
        self.points.append((axes, x, y, text))

    def draw(self, figure: Any) -> Drawn:
        held = io.BytesIO()
        figure.savefig(held, format="rgba")
        size = figure.bbox.size
        places = []
        for axes, x, y, text in self.points:
            across, up = axes.transData.transform((x, y)) / size
            places.append((round(100 * float(across), 2), round(100 - 100 * float(up), 2), text))
        return Drawn(_png(held.getvalue(), figure.canvas.get_width_height()), places)


def _png(pixels: bytes, size: tuple[int, int]) -> bytes:
    """A PNG of 256 colours: what figures show needs no more, and a page of many runs is a third as large."""
    image = Image.frombytes("RGBA", size, pixels).convert("RGB")
    held = io.BytesIO()
    image.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(held, format="png")
    return held.getvalue()


def best(entries: Sequence[Entry], most: int = MOST_LINES) -> list[Entry]:
    """The entries to draw, by A_B where there are too many, in the order given."""
    chosen = sorted(entries, key=lambda entry: -entry.group.last.mean)[:most]
    return [entry for entry in entries if entry in chosen]


def accuracy(entries: Sequence[Entry], theme: Theme) -> Drawn:
    """A_k after each task, a line for each method, ± a standard deviation over runs."""
    entries, tips = best(entries), Tips()
    with figure_style(theme) as pyplot:
        long = max(len(entry.group.label) for entry in entries) > 24
        rows = _legend_lines([entry.group.label for entry in entries]) if long else -(-len(entries) // 2)
        figure, axes = pyplot.subplots(figsize=(WIDTH, 3.4 + 0.2 * rows))
        for group, look in ((entry.group, entry.look) for entry in entries):
            values = np.array([run.values["after"] for run in group.runs])
            across = np.arange(1, values.shape[1] + 1)
            mean, std = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
            colour = look.colour(theme)
            own = group.first.method in ("dmc", "dmc-ot")
            axes.plot(
                across, mean, color=colour, marker=look.marker, label=_wrap(group.label, LEGEND), zorder=3 if own else 2
            )
            axes.fill_between(across, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
            for task, value, wide in zip(across, mean, std, strict=True):
                more = f" ± {wide:.1f}" if len(values) > 1 else ""
                tips.add(axes, task, value, f"{group.label}, after task {task}: {value:.1f} %{more}")
        axes.set_xlabel("tasks learnt")
        axes.set_ylabel("accuracy over all classes seen, %")
        axes.set_xticks(across if len(across) <= 12 else across[:: -(-len(across) // 10)])
        low, high = axes.get_ylim()
        axes.set_ylim(max(0, low), min(100.5, high))
        figure.legend(loc="outside lower center", ncols=1 if long else 2)
        return tips.draw(figure)


def scores(entries: Sequence[Entry], theme: Theme) -> Drawn:
    """A_B with its 95 % interval, the best on top."""
    entries = sorted(best(entries, MOST_SCORES), key=lambda entry: -entry.group.last.mean)
    tips = Tips()
    with figure_style(theme) as pyplot:
        figure, axes = _rows_of(pyplot, entries, 0.9)
        for place, entry in enumerate(entries):
            mean, colour = entry.group.last.mean, entry.look.colour(theme)
            low, high = (entry.interval.low, entry.interval.high) if entry.interval else (mean, mean)
            axes.plot([low, high], [place, place], color=colour, linewidth=2.4, solid_capstyle="butt")
            axes.plot(mean, place, color=colour, marker=entry.look.marker, markersize=7)
            for run in entry.group.runs if len(entry.group.runs) > 1 else ():
                axes.plot(run.last, place, marker="|", color=INKS[theme].text, markersize=6, alpha=0.7)
                tips.add(axes, run.last, place, f"{entry.group.label}, {run.order}, seed {run.seed}: {run.last:.1f} %")
            tips.add(axes, mean, place, f"{entry.group.label}: {entry.interval or f'{mean:.2f}'} %")
        _label_rows(axes, entries, theme)
        axes.set_ylim(len(entries) - 0.5, -0.5)
        axes.set_xlabel("A_B, %")
        return tips.draw(figure)


def matrix(group: Group, theme: Theme) -> Drawn:
    """R[k, i]: accuracy on task i after learning task k, the mean over runs."""
    values = [[np.nan if v is None else v for v in row] for run in group.runs for row in run.values["matrix"]]
    mean = np.array(values, dtype=np.float64).reshape(len(group.runs), group.first.tasks, -1).mean(0)
    said = "task {column} after learning task {row}: {value:.1f} %"
    return _heat(mean, ("task measured", "after learning task", "accuracy, %"), said, theme)


def confusion(group: Group, theme: Theme) -> Drawn:
    """Of the test pictures of a task, the share classified as a class of each task, at the end."""
    counts = np.sum([run.values["between_tasks"] for run in group.runs], axis=0, dtype=np.float64)
    share = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    said = "{value:.1f} % of the pictures of task {row} were classified as a class of task {column}"
    return _heat(share, ("classified as a class of task", "pictures of task", "share, %"), said, theme)


def forgetting(entries: Sequence[Entry], theme: Theme) -> Drawn:
    """Best accuracy so far − accuracy at the end, the mean over tasks but the last."""
    entries, tips = best(entries, MOST_BARS), Tips()
    with figure_style(theme) as pyplot:
        figure, axes = _rows_of(pyplot, entries, 0.9)
        for place, entry in enumerate(entries):
            spread = entry.group.spread(lambda run: float(run.values["forgetting"]))
            axes.barh(place, spread.mean, color=entry.look.colour(theme), height=0.65)
            if spread.std is not None:
                axes.errorbar(spread.mean, place, xerr=spread.std, color=INKS[theme].text, capsize=3, linewidth=1.2)
            edge = max(spread.mean + (spread.std or 0), 0)
            axes.annotate(f"{spread.mean:.1f}", (edge, place), (5, 0), textcoords="offset points", va="center")
            tips.add(axes, spread.mean, place, f"{entry.group.label}: forgetting {spread}")
        _label_rows(axes, entries, theme)
        axes.margins(x=0.14)
        axes.set_xlabel("forgetting, percentage points")
        return tips.draw(figure)


def has_drift(group: Group) -> bool:
    return any(value for run in group.runs for value in run.values.get("drift", []))


def drift(entries: Sequence[Entry], theme: Theme) -> Drawn:
    """How far the stored means lie from the true ones after each task, before and after calibration."""
    entries, tips = best([entry for entry in entries if has_drift(entry.group)], MOST_DRIFTS), Tips()
    with figure_style(theme) as pyplot:
        height = 4.4 + 0.2 * 2 * _legend_lines([f"{entry.group.label}: before calibration" for entry in entries])
        figure, panels = pyplot.subplots(2, 1, figsize=(WIDTH, height), sharex=True)
        for panel, key, name in zip(panels, ("cosine", "w2"), ("1 − cosine of means", "W₂ of Gaussians"), strict=True):
            for group, look in ((entry.group, entry.look) for entry in entries):
                ink = look.colour(theme)
                # A ring around the dot: both can be seen where calibration changed nothing.
                rings, dots = {"ls": ":", "mfc": INKS[theme].page, "ms": 9}, {"ls": "-", "ms": 4}
                for when, how in (("before", rings), ("after", dots)):
                    across, mean = _drift_line(group, f"{key}_{when}")
                    label = _wrap(f"{group.label}: {when} calibration", LEGEND) if key == "cosine" else None
                    panel.plot(across, mean, color=ink, marker=look.marker, label=label, **how)
                    for task, value in zip(across, mean, strict=True):
                        tips.add(panel, task, value, f"{group.label}, task {task}, {when} calibration: {value:.4f}")
            panel.set_ylabel(name)
            panel.set_ylim(0, 1.06 * panel.get_ylim()[1])
        panels[-1].set_xlabel("tasks learnt")
        panels[-1].xaxis.get_major_locator().set_params(integer=True)
        figure.legend(loc="outside lower center", ncols=1)
        return tips.draw(figure)


def seconds(entries: Sequence[Entry], theme: Theme) -> Drawn:
    """Where the time went, the mean over runs."""
    entries, tips = best(entries, MOST_BARS), Tips()
    parts = [_phases(entry.group) for entry in entries]
    names = list(dict.fromkeys(name for phases in parts for name in phases))
    with figure_style(theme) as pyplot:
        figure, axes = _rows_of(pyplot, entries, 1.2 + 0.2 * -(-len(names) // 3))
        left = np.zeros(len(entries))
        for name, look in zip(names, series_looks(len(names)), strict=True):
            widths = np.array([phases.get(name, 0.0) for phases in parts])
            edge = {"edgecolor": INKS[theme].page, "linewidth": 0.6}
            axes.barh(range(len(entries)), widths, left=left, color=look.colour(theme), height=0.65, label=name, **edge)
            for place, (start, wide) in enumerate(zip(left, widths, strict=True)):
                if wide > 0:
                    tips.add(axes, start + wide / 2, place, f"{entries[place].group.label}, {name}: {wide:.1f} s")
            left += widths
        for place, total in enumerate(left):
            axes.annotate(f"{total:.1f}", (total, place), (5, 0), textcoords="offset points", va="center")
        _label_rows(axes, entries, theme)
        axes.margins(x=0.14)
        axes.set_xlabel("seconds")
        figure.legend(loc="outside lower center", ncols=3)
        return tips.draw(figure)


def _phases(group: Group) -> dict[str, float]:
    """Seconds of what lies inside learning (from 2 % of the whole on), of the rest of it, and of the other phases."""
    total: dict[str, float] = {}
    for run in group.runs:
        for name, value in run.timing.get("seconds", {}).items():
            total[name] = total.get(name, 0.0) + value / len(group.runs)
    whole = sum(total.get(name, 0.0) for name in WHOLE)
    inner = {name: value for name, value in total.items() if name not in WHOLE and value > 0.02 * whole}
    rest = {"rest of learning": max(0.0, total.get("learning", 0.0) - sum(inner.values()))}
    return {**inner, **rest, **{name: total[name] for name in WHOLE if name in total and name != "learning"}}


def _drift_line(group: Group, key: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    found = [run.values["drift"] for run in group.runs if any(run.values.get("drift", []))]
    rows = [[(step or {}).get(key, np.nan) for step in steps] for steps in found]
    mean = np.array(rows, dtype=np.float64).mean(0)
    known = ~np.isnan(mean)
    return np.arange(1, len(mean) + 1)[known], mean[known]


def _heat(values: NDArray[np.float64], axis_names: tuple[str, str, str], said: str, theme: Theme) -> Drawn:
    """Cells with their numbers where there is room; cividis reads the same with and without colour blindness."""
    count, tips = len(values), Tips()
    across, down, what = axis_names
    known = values[~np.isnan(values)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 100.0)
    with figure_style(theme) as pyplot:
        from matplotlib.ticker import MaxNLocator

        # Fixed margins: a layout found from the texts would double the time, and a report may have hundreds of these.
        figure, axes = pyplot.subplots(figsize=(WIDTH, 4.6), layout="none")
        figure.subplots_adjust(left=0.105, right=0.865, bottom=0.105, top=0.985)
        image = axes.imshow(
            np.ma.masked_invalid(values), cmap="cividis", vmin=low, vmax=max(high, low + 1), aspect="auto"
        )
        axes.grid(visible=False)
        for side in axes.spines.values():
            side.set_visible(False)
        ticks = range(0, count, 1 if count <= 12 else 2)
        axes.set_xticks(ticks, [str(tick + 1) for tick in ticks])
        axes.set_yticks(ticks, [str(tick + 1) for tick in ticks])
        axes.set_xlabel(across)
        axes.set_ylabel(down)
        for (row, column), value in np.ndenumerate(values):
            if np.isnan(value):
                continue
            tips.add(axes, column, row, said.format(row=row + 1, column=column + 1, value=value))
            if count <= 12 and round(value) > 0:
                ink = "#000000" if value > low + 0.55 * (high - low) else "#ffffff"
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=9)
        bar = figure.colorbar(image, ax=axes, label=what, fraction=0.045, pad=0.02)
        bar.locator = MaxNLocator(integer=True, min_n_ticks=1)  # the margin has room for "100", not for "69.5"
        bar.update_ticks()
        bar.outline.set_visible(False)
        return tips.draw(figure)


def _rows_of(pyplot: Any, entries: Sequence[Entry], extra: float) -> tuple[Any, Any]:
    """A figure with a row for each entry, high enough for the lines of the longest label."""
    lines = max(1 + _wrap(entry.group.label).count("\n") for entry in entries)
    figure, axes = pyplot.subplots(figsize=(WIDTH, extra + (0.17 + 0.15 * lines) * len(entries)))
    return figure, axes


def _label_rows(axes: Any, entries: Sequence[Entry], theme: Theme) -> None:
    axes.set_yticks(range(len(entries)), [_wrap(entry.group.label) for entry in entries])
    axes.tick_params(axis="y", labelcolor=INKS[theme].text, length=0)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _legend_lines(labels: Sequence[str]) -> int:
    """Lines of a legend of one column."""
    return sum(1 + _wrap(label, LEGEND).count("\n") for label in labels)


def _wrap(label: str, width: int = 22) -> str:
    import textwrap

    return textwrap.fill(label, width)

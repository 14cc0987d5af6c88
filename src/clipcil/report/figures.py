"""The figures of a report and the curve of a sweep. A figure of a report is a PNG with texts for its points."""

import io
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clipcil.errors import UserError
from clipcil.intervals import wilson_interval
from clipcil.report.compare import Group, MeanStd, Standing
from clipcil.report.runs import WHOLE
from clipcil.report.style import INKS, LOOKS, Theme, figure_style, series_looks
from clipcil.storage import read_bytes, whole_file

MOST_METHODS = {"scores": 36, "accuracy": 12, "forgetting": 24, "drift": 6, "seconds": 24}
"""Maximum number of methods in a figure; of more, the best by A_B are shown."""
FIGURE_WIDTH = 4.8
"""Width in inches: narrow enough for its text to be legible on a phone."""
LEGEND_WIDTH = 52
"""Characters of a line of a legend, which is as wide as the figure."""
ROW_WIDTH = 22
"""Characters of a line of a label at the left of its row."""
MADE_BY = "clipcil sweep"
"""Creator in the metadata of a curve: a file without it belongs to the user."""
MOST_CLASSES = 18
"""Classes in the confusion matrix of a model."""
LABEL_WIDTH = 16
"""Characters of a label of a confusion matrix."""
FORMATS = ("png", "svg", "pdf")


class Figure(NamedTuple):
    """A PNG, and texts to show where the pointer rests."""

    png: bytes
    points: list[tuple[float, float, str]]
    """Place from the left and from the top, in percent of the figure, and a text."""


class Canvas:
    """A matplotlib figure, with the points that have a text."""

    def __init__(self, pyplot: Any, height: float, panels: int = 1, **options: Any) -> None:
        self.figure, axes = pyplot.subplots(panels, 1, figsize=(FIGURE_WIDTH, height), squeeze=False, **options)
        self.panels = axes[:, 0]
        self.axes: Any = axes[0, 0]
        self.points: list[tuple[Any, float, float, str]] = []

    def tip(self, x: float, y: float, text: str, axes: Any = None) -> None:
        """Show `text` at a point in the coordinates of the axes."""
        self.points.append((axes or self.axes, x, y, text))

    def draw(self) -> Figure:
        """The figure as a PNG of 256 colours, which is a third as large as one of all colours."""
        pixels, png = io.BytesIO(), io.BytesIO()
        self.figure.savefig(pixels, format="rgba")
        places = []
        for axes, x, y, text in self.points:
            across, up = axes.transData.transform((x, y)) / self.figure.bbox.size
            places.append((round(100 * float(across), 2), round(100 - 100 * float(up), 2), text))
        image = Image.frombytes("RGBA", self.figure.canvas.get_width_height(), pixels.getvalue()).convert("RGB")
        image.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(png, format="png")
        return Figure(png.getvalue(), places)


def best(standings: Sequence[Standing], most: int) -> list[Standing]:
    """At most `most` standings, the best by A_B, in the order given."""
    chosen = sorted(standings, key=lambda standing: -standing.group.last.mean)[:most]
    return [standing for standing in standings if standing in chosen]


def accuracy(standings: Sequence[Standing], theme: Theme) -> Figure:
    """A_k after each task, a line for each method, ± a standard deviation over runs."""
    with figure_style(theme) as pyplot:
        labels = [standing.group.label for standing in standings]
        long = max(map(len, labels)) > 24
        canvas = Canvas(pyplot, 3.4 + 0.2 * (_legend_lines(labels) if long else -(-len(standings) // 2)))
        axes = canvas.axes
        for group, look in ((standing.group, standing.look) for standing in standings):
            values = np.array([run.after for run in group.runs])
            across = np.arange(1, values.shape[1] + 1)
            mean, std = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
            line = {"color": look.colour(theme), "marker": look.marker, "label": fill(group.label, LEGEND_WIDTH)}
            axes.plot(across, mean, zorder=3 if group.first.method in ("dmc", "dmc-ot") else 2, **line)
            axes.fill_between(across, mean - std, mean + std, color=line["color"], alpha=0.15, linewidth=0)
            for task, value, wide in zip(across, mean, std, strict=True):
                more = f" ± {wide:.1f}" if len(values) > 1 else ""
                canvas.tip(task, value, f"{group.label}, after task {task}: {value:.1f} %{more}")
        axes.set(xlabel="tasks learnt", ylabel="A_k: mean of the tasks' accuracies, %")
        axes.set_xticks(across if len(across) <= 12 else across[:: -(-len(across) // 10)])
        low, high = axes.get_ylim()
        axes.set_ylim(max(0, low), min(100.5, high))
        canvas.figure.legend(loc="outside lower center", ncols=1 if long else 2)
        return canvas.draw()


def scores(standings: Sequence[Standing], theme: Theme) -> Figure:
    """A_B with its 95 % interval, the best on top."""
    standings = sorted(standings, key=lambda standing: -standing.group.last.mean)
    with figure_style(theme) as pyplot:
        canvas = _rows(pyplot, standings, theme, "A_B, %")
        axes = canvas.axes
        for place, standing in enumerate(standings):
            group, interval = standing.group, standing.interval
            mean, colour = group.last.mean, standing.look.colour(theme)
            low, high = (interval.low, interval.high) if interval else (mean, mean)
            axes.plot([low, high], [place, place], color=colour, linewidth=2.4, solid_capstyle="butt")
            axes.plot(mean, place, color=colour, marker=standing.look.marker, markersize=7)
            for run in group.runs if len(group.runs) > 1 else ():
                axes.plot(run.last, place, marker="|", color=INKS[theme].text, markersize=6, alpha=0.7)
                canvas.tip(run.last, place, f"{group.label}, {run.order}, seed {run.seed}: {run.last:.1f} %")
            canvas.tip(mean, place, f"{group.label}: {interval or f'{mean:.2f}'} %")
        axes.set_ylim(len(standings) - 0.5, -0.5)
        return canvas.draw()


def matrix(group: Group, theme: Theme) -> Figure:
    """R[k, i]: accuracy on task i after learning task k, the mean over runs."""
    values = [[np.nan if v is None else v for v in row] for run in group.runs for row in run.matrix]
    mean = np.array(values, dtype=np.float64).reshape(len(group.runs), group.first.tasks, -1).mean(0)
    tip = "task {column} after learning task {row}: {value:.1f} %"
    return _heat(mean, ("task measured", "after learning task", "accuracy, %"), tip, theme)


def confusion(group: Group, theme: Theme) -> Figure:
    """Of the test pictures of a task, the share classified as a class of each task, at the end."""
    counts = np.sum([run.between_tasks for run in group.runs], axis=0, dtype=np.float64)
    share = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    tip = "{value:.1f} % of the pictures of task {row} were classified as a class of task {column}"
    return _heat(share, ("classified as a class of task", "pictures of task", "share, %"), tip, theme)


def answers(found: Any, theme: Theme) -> Figure:
    """Of the pictures of a model's classes, the share that was given each class or none. Of more than `MOST_CLASSES`
    classes those with the most mistakes are shown. `found` is an `Evaluation`."""
    wrong = Counter({one.name: one.pictures - one.right for one in found.classes})
    for pair in found.confused:
        wrong[pair.guess] += pair.pictures
    worst = sorted((one.name for one in found.classes), key=lambda name: -wrong[name])[:MOST_CLASSES]
    shown = [one for one in found.classes if one.name in worst]
    names = [one.name for one in shown]
    share = np.diag([float(one.right) for one in shown])
    none = np.array([one.pictures - one.right for one in shown], dtype=np.float64)
    for pair in found.confused:
        if pair.true in names:
            none[names.index(pair.true)] -= pair.pictures
            if pair.guess in names:
                share[names.index(pair.true), names.index(pair.guess)] = pair.pictures
    share = 100 * np.column_stack([share, none]) / np.array([[one.pictures] for one in shown])
    tip = "{value:.0f} % of the pictures of {row} were called {column}"
    return _heat(share, ("answer", "class", "share, %"), tip, theme, (names, [*names, "none of these"]))


def lessons(history: Sequence[Any], theme: Theme) -> Figure:
    """The accuracy over all classes after each lesson of a model, with its 95 % interval; `LessonRecord`s."""
    with figure_style(theme) as pyplot:
        canvas = Canvas(pyplot, 2.8)
        measured = [(place, one) for place, one in enumerate(history, 1) if one.held_out]
        ends = 100 * np.array([wilson_interval(one.right, one.held_out) for _, one in measured])
        across, line = [place for place, _ in measured], {"color": LOOKS["dmc"].colour(theme), "marker": "o"}
        canvas.axes.plot(across, [100 * one.right / one.held_out for _, one in measured], **line)
        canvas.axes.fill_between(across, ends[:, 0], ends[:, 1], color=line["color"], alpha=0.15, linewidth=0)
        for place, one in measured:
            value = 100 * one.right / one.held_out
            canvas.tip(
                place, value, f"after lesson {place}: {value:.1f} % of {one.held_out} pictures, {one.classes} classes"
            )
        canvas.axes.set(xlabel="lessons", ylabel="accuracy over all classes, %", ylim=(0, 102))
        canvas.axes.xaxis.get_major_locator().set_params(integer=True)
        return canvas.draw()


def forgetting(standings: Sequence[Standing], theme: Theme) -> Figure:
    """Best accuracy so far − accuracy at the end, the mean over tasks but the last."""
    with figure_style(theme) as pyplot:
        canvas = _rows(pyplot, standings, theme, "forgetting, percentage points")
        for place, standing in enumerate(standings):
            value = standing.group.of("forgetting")
            canvas.axes.barh(place, value.mean, color=standing.look.colour(theme), height=0.65)
            if value.std is not None:
                whisker = {"color": INKS[theme].text, "capsize": 3, "linewidth": 1.2}
                canvas.axes.errorbar(value.mean, place, xerr=value.std, **whisker)
            _annotate(canvas.axes, max(value.mean + (value.std or 0), 0), place, value.mean)
            canvas.tip(value.mean, place, f"{standing.group.label}: forgetting {value}")
        canvas.axes.margins(x=0.14)
        return canvas.draw()


def drift(standings: Sequence[Standing], theme: Theme) -> Figure:
    """Distance of the stored means from the true ones after each task, before and after calibration."""
    with figure_style(theme) as pyplot:
        labels = [f"{standing.group.label}: before calibration" for standing in standings]
        canvas = Canvas(pyplot, 4.4 + 0.2 * 2 * _legend_lines(labels), panels=2, sharex=True)
        # A ring around the dot: both can be seen where calibration changed nothing.
        rings, dots = {"ls": ":", "mfc": INKS[theme].page, "ms": 9}, {"ls": "-", "ms": 4}
        names = (("cosine", "1 − cosine of means"), ("w2", "W₂ of Gaussians"))
        for panel, (key, name) in zip(canvas.panels, names, strict=True):
            for group, look in ((standing.group, standing.look) for standing in standings):
                for when, style in (("before", rings), ("after", dots)):
                    across, mean = _drift_line(group, f"{key}_{when}")
                    label = fill(f"{group.label}: {when} calibration", LEGEND_WIDTH) if key == "cosine" else None
                    panel.plot(across, mean, color=look.colour(theme), marker=look.marker, label=label, **style)
                    for task, value in zip(across, mean, strict=True):
                        canvas.tip(task, value, f"{group.label}, task {task}, {when} calibration: {value:.4f}", panel)
            panel.set_ylabel(name)
            panel.set_ylim(0, 1.06 * panel.get_ylim()[1])
        panel.set_xlabel("tasks learnt")
        panel.xaxis.get_major_locator().set_params(integer=True)
        canvas.figure.legend(loc="outside lower center", ncols=1)
        return canvas.draw()


def seconds(standings: Sequence[Standing], theme: Theme) -> Figure:
    """Seconds of each phase, the mean over runs."""
    parts = [_phases(standing.group) for standing in standings]
    names = list(dict.fromkeys(name for phases in parts for name in phases))
    with figure_style(theme) as pyplot:
        canvas = _rows(pyplot, standings, theme, "seconds", 1.2 + 0.2 * -(-len(names) // 3))
        places, left = range(len(standings)), np.zeros(len(standings))
        bar = {"height": 0.65, "edgecolor": INKS[theme].page, "linewidth": 0.6}
        for name, look in zip(names, series_looks(len(names)), strict=True):
            widths = np.array([phases.get(name, 0.0) for phases in parts])
            canvas.axes.barh(places, widths, left=left, color=look.colour(theme), label=name, **bar)
            for place, (start, wide) in enumerate(zip(left, widths, strict=True)):
                if wide > 0:
                    canvas.tip(start + wide / 2, place, f"{standings[place].group.label}, {name}: {wide:.1f} s")
            left += widths
        for place, total in enumerate(left):
            _annotate(canvas.axes, total, place, total)
        canvas.axes.margins(x=0.14)
        canvas.figure.legend(loc="outside lower center", ncols=3)
        return canvas.draw()


def _phases(group: Group) -> dict[str, float]:
    """Seconds of the parts of learning (from 2 % of the whole on), of learning beside them, and of the other phases."""
    total: dict[str, float] = {}
    for run in group.runs:
        for name, value in run.timing.seconds.items():
            total[name] = total.get(name, 0.0) + value / len(group.runs)
    whole = sum(total.get(name, 0.0) for name in WHOLE)
    inner = {name: value for name, value in total.items() if name not in WHOLE and value > 0.02 * whole}
    rest = {"other learning": max(0.0, total.get("learning", 0.0) - sum(inner.values()))}
    return {**inner, **rest, **{name: total[name] for name in WHOLE if name in total and name != "learning"}}


def _drift_line(group: Group, key: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    rows = [[(step or {}).get(key, np.nan) for step in run.drift] for run in group.runs if any(run.drift)]
    mean = np.array(rows, dtype=np.float64).mean(0)
    known = ~np.isnan(mean)
    return np.arange(1, len(mean) + 1)[known], mean[known]


def _heat(
    values: NDArray[np.float64],
    names: tuple[str, str, str],
    tip: str,
    theme: Theme,
    labels: tuple[list[str], list[str]] | None = None,
) -> Figure:
    """Cells with their numbers where there is room; cividis reads the same with and without colour blindness. `labels`
    are those of rows and columns; without them they are counted from 1."""
    count = len(values)
    rows, columns = labels or [[str(place + 1) for place in range(size)] for size in values.shape]
    known = values[~np.isnan(values)]
    low, high = (known.min(), known.max()) if known.size else (0.0, 100.0)
    with figure_style(theme) as pyplot:
        from matplotlib.ticker import MaxNLocator

        # Fixed margins: a layout found from the texts would double the time, and a report may have hundreds of these.
        canvas = Canvas(pyplot, 4.6, layout="none")
        axes = canvas.axes
        near = 0.24 if labels else 0.105
        canvas.figure.subplots_adjust(left=near, right=0.865, bottom=near, top=0.985)
        shown, scale = np.ma.masked_invalid(values), {"vmin": low, "vmax": max(high, low + 1)}
        image = axes.imshow(shown, cmap="cividis", aspect="auto", **scale)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        step = 1 if labels or count <= 12 else 2
        axes.set_xticks(
            range(0, len(columns), step), [shorten(name) for name in columns[::step]], rotation=90 * bool(labels)
        )
        axes.set_yticks(range(0, len(rows), step), [shorten(name) for name in rows[::step]])
        if labels:
            axes.tick_params(labelsize=8 if count <= 12 else 7)
        axes.set(xlabel=names[0], ylabel=names[1])
        for (row, column), value in np.ndenumerate(values):
            if np.isnan(value):
                continue
            canvas.tip(column, row, tip.format(row=rows[row], column=columns[column], value=value))
            if count <= 12 and round(value) > 0:
                ink = "#000000" if value > low + 0.55 * (high - low) else "#ffffff"
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=9)
        bar = canvas.figure.colorbar(image, ax=axes, label=names[2], fraction=0.045, pad=0.02)
        bar.locator = MaxNLocator(integer=True, min_n_ticks=1)  # the margin has room for "100", not for "69.5"
        bar.update_ticks()
        bar.outline.set_visible(False)
        return canvas.draw()


def shorten(name: str) -> str:
    """A name of at most `LABEL_WIDTH` characters."""
    return name if len(name) <= LABEL_WIDTH else f"{name[: LABEL_WIDTH - 1]}…"


def _rows(pyplot: Any, standings: Sequence[Standing], theme: Theme, below: str, extra: float = 0.9) -> Canvas:
    """A canvas with a row for each standing, high enough for the lines of the longest label."""
    labels = [fill(standing.group.label, ROW_WIDTH) for standing in standings]
    lines = max(1 + label.count("\n") for label in labels)
    canvas = Canvas(pyplot, extra + (0.17 + 0.15 * lines) * len(labels))
    canvas.axes.set_yticks(range(len(labels)), labels)
    canvas.axes.tick_params(axis="y", labelcolor=INKS[theme].text, length=0)
    canvas.axes.invert_yaxis()
    canvas.axes.grid(axis="y", visible=False)
    canvas.axes.set_xlabel(below)
    return canvas


def _annotate(axes: Any, x: float, y: float, value: float) -> None:
    axes.annotate(f"{value:.1f}", (x, y), (5, 0), textcoords="offset points", va="center")


def _legend_lines(labels: Sequence[str]) -> int:
    """Lines of a legend of one column."""
    return sum(1 + fill(label, LEGEND_WIDTH).count("\n") for label in labels)


class Curve(NamedTuple):
    """The curve of a sweep on one dataset: the value, A_B and Ā of each point."""

    name: str
    points: list[tuple[str, MeanStd, MeanStd]]


def save_sweep(curves: Sequence[Curve], title: str, key: str, path: Path) -> None:
    """Draw A_B solid and Ā dashed, ± a standard deviation where there are several runs.

    Values are in order of size at equal distances: the values of a sweep usually grow by factors, and often include
    zero, which a logarithmic axis cannot show.
    """
    values = sorted(dict.fromkeys(value for curve in curves for value, _, _ in curve.points), key=_size)
    with figure_style("light") as pyplot:
        figure, axes = pyplot.subplots(figsize=(5.6, 3.8))
        for curve, look in zip(curves, series_looks(len(curves)), strict=True):
            for which, dash, name in ((0, "-", "A_B"), (1, "--", "Ā")):
                points = sorted((values.index(value), both[which]) for value, *both in curve.points)
                across = [x for x, _ in points]
                mean = np.array([value.mean for _, value in points])
                std = np.array([value.std or 0.0 for _, value in points])
                label = f"{curve.name}, {name}" if len(curves) > 1 else name
                axes.plot(across, mean, dash, color=look.light, marker=look.marker, label=label)
                axes.fill_between(across, mean - std, mean + std, color=look.light, alpha=0.15, linewidth=0)
        axes.set_xticks(range(len(values)), values, rotation=30 if max(map(len, values)) > 6 else 0)
        axes.set(xlabel=key, ylabel="accuracy, %", title=title)
        figure.legend(loc="outside lower center", ncols=min(2 * len(curves), 4))
        with whole_file(path) as part:
            figure.savefig(part, format=path.suffix[1:].lower(), metadata={"Creator": MADE_BY})


def check_plot(path: Path) -> None:
    """Refuse a file whose ending is not one of `FORMATS`, or that is not the curve of an earlier sweep."""
    if path.suffix[1:].lower() not in FORMATS:
        raise UserError(f"{path} cannot be a curve; name a file that ends in .{', .'.join(FORMATS)}")
    if os.path.lexists(path) and (not path.is_file() or MADE_BY.encode() not in read_bytes(path, 2**26)):
        raise UserError(f"{path} exists and is not a curve of clipcil; name another file with --plot")


def _size(value: str) -> tuple[int, float]:
    """Sorts numbers by size, and words behind them."""
    try:
        return 0, float(value)
    except ValueError:
        return 1, 0.0

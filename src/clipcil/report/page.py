"""The report: one HTML file that needs nothing else, and its figures as PNGs beside it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from markupsafe import Markup

from clipcil.errors import UserError
from clipcil.paper.tables import BACKBONE
from clipcil.report import figures
from clipcil.report.answers import TestAnswer, confused_pairs, read_predictions
from clipcil.report.compare import (
    Group,
    Standing,
    Stream,
    finding,
    flatten,
    group_runs,
    rank_groups,
    show,
    stream_titles,
)
from clipcil.report.html import Cell, claim_page, write_page
from clipcil.report.pictures import Thumbnails
from clipcil.report.runs import RunResult
from clipcil.storage import claim, read_json, refuse_links, write_bytes

OWN_FIGURE = re.compile(
    r"[a-z0-9-]*-\d+tasks-\d+-([a-z0-9-]+-)?(scores|accuracy|forgetting|drift|seconds|matrix|confusion)(-dark)?\.png"
)
"""The name of a figure of a report."""
SAME = 0.005
"""Numbers nearer than this are printed the same."""
CAPTIONS = {
    "scores": "A_B with its 95 % interval over runs and test pictures.",
    "accuracy": "A_k: the mean over tasks seen of the accuracy on each, after each task.",
    "forgetting": "Forgetting: best accuracy so far − accuracy at the end, the mean over all tasks but the last.",
    "drift": "Drift: how far stored class Gaussians lie from the features that the same training pictures have today,"
    " before and after calibration. The experiment measures it; no method sees it.",
    "seconds": "Where the time went; what several runs share is paid for by the first.",
    "matrix": "R: accuracy on each task (across) after learning each task (down).",
    "confusion": "Confusion between tasks at the end: where the test pictures of each task went.",
}
TITLES = {"scores": "A_B", "accuracy": "Accuracy by task", "matrix": "R matrix", "confusion": "Confusion between tasks"}
REPEATED = {"scores": " A tick is one run.", "accuracy": " The band is ± one standard deviation over runs."}
"""What a caption says more where there are several runs of a method."""


class PageFigure(NamedTuple):
    """A figure in both themes, with its name, its title and its caption."""

    name: str
    title: str
    caption: str
    light: figures.Figure
    dark: figures.Figure


class Report:
    """The variables of the template `report.html`; the figures are collected in `figures`."""

    def __init__(self, runs: Sequence[RunResult]) -> None:
        self.runs = runs
        self.groups = group_runs(runs)
        self.thumbnails = Thumbnails()
        self.figures: list[PageFigure] = []

    def variables(self) -> dict[str, Any]:
        """The streams with everything that is shown about them."""
        streams: dict[Stream, list[Group]] = {}
        for group in self.groups:
            streams.setdefault(group.stream, []).append(group)
        titles = stream_titles(list(streams))
        days = sorted({run.finished for run in self.runs} - {""})
        return {
            "count": sum(len(group.runs) for group in self.groups),  # a run that stands in two folders counts once
            "when": f", {days[0]}" if len(days) == 1 else f", {days[0]} to {days[-1]}" if days else "",
            "paper_backbone": BACKBONE,
            "streams": [
                self.stream(number, title, rank_groups(groups))
                for number, (title, groups) in enumerate(zip(titles, streams.values(), strict=True))
            ],
        }

    def stream(self, number: int, title: str, standings: list[Standing]) -> dict[str, Any]:
        """One stream of tasks: its table, the figures that compare methods, then each method."""
        first = standings[0].group.first
        name = f"{_slug(first.data)}-{first.tasks}tasks-{number}"
        papers = [standing.group.paper_result() for standing in standings]
        return {
            "title": title,
            "finding": finding(standings, title),
            "measured_on": _measured_on(standings),
            "backbone": first.backbone,
            "standings": list(zip(standings, papers, strict=True)),
            "is_clear": not any(standing.tied for standing in standings),
            "columns": _more_columns(standings),
            "tables": sorted({paper.table for paper in papers if paper}),
            "variants": any("=" in standing.group.label for standing in standings),
            "repeated": any(len(standing.group.runs) > 1 for standing in standings),
            "figures": self.comparisons(name, standings),
            "methods": [self.method(name, standing.group, len(standings) == 1) for standing in standings],
        }

    def comparisons(self, name: str, standings: list[Standing]) -> list[PageFigure]:
        """The figures that show all methods at once; a chart with one bar is left out."""
        runs = [run for standing in standings for run in standing.group.runs]
        several, repeated = len(standings) > 1, len(runs) > len(standings)
        moved = [standing for standing in standings if figures.has_drift(standing.group)]
        shown = {
            "scores": standings if several else [],
            "accuracy": standings,
            "forgetting": standings if several and runs[0].tasks > 1 else [],
            "drift": moved,
            "seconds": standings if several and any(run.timing for run in runs) else [],
        }
        found = []
        for kind, members in shown.items():
            more, most = REPEATED.get(kind, "") if repeated else "", figures.MOST[kind]
            more += f" The {most} best of {len(members)} by A_B." if len(members) > most else ""
            found += [self.figure(name, kind, members, TITLES.get(kind, kind.title()), more)] if members else []
        return found

    def figure(self, name: str, kind: str, what: Any, title: str, more: str) -> PageFigure:
        """Draw a figure in both themes; `more` is added to its caption."""
        light, dark = (getattr(figures, kind)(what, theme) for theme in ("light", "dark"))
        self.figures.append(PageFigure(f"{name}-{kind}", title, CAPTIONS[kind] + more, light, dark))
        return self.figures[-1]

    def method(self, stream: str, group: Group, is_open: bool) -> dict[str, Any]:
        """The R matrix, confusion between tasks, classes, pictures, notes and settings of one group."""
        name = f"{stream}-{_slug(group.label)}-{self.groups.index(group)}"
        several = len(group.runs) > 1
        over = f" Mean over {group.over}." if several else ""
        kinds = ("matrix", "confusion") if group.first.tasks > 1 else ()
        predictions: list[TestAnswer] = []
        no_pairs = no_pictures = ""
        try:
            predictions = [each for run in group.runs for each in read_predictions(run.folder)]
        except UserError as error:
            no_pairs = str(error)
        try:
            right, mistakes = self.thumbnails.of(group.first)
        except UserError as error:
            right, mistakes, no_pictures = [], [], str(error)
        return {
            "group": group,
            "open": is_open,
            "figures": [self.figure(name, kind, group, f"{TITLES[kind]} of {group.label}", over) for kind in kinds],
            "notes": list(dict.fromkeys(note for run in group.runs for note in run.values["notes"])),
            "one_order": _has_one_order(group),
            "classes": class_rows(group, predictions),
            "confused": confused_pairs(predictions),
            "no_pairs": no_pairs,
            "no_pictures": no_pictures,
            "right": right,
            "mistakes": mistakes,
            "has_probabilities": any(each.probability is not None for each in (*right, *mistakes)),
            "which": f" ({group.first.order}, seed {group.first.seed})" if several else "",
            "settings": [(key, show(value)) for key, value in all_settings(group).items()],
        }


def write_report(runs: Sequence[RunResult], out: Path, more: str = "") -> list[str]:
    """Write `out` and the folder of its figures; a report replaces an earlier report and its figures.

    Args:
        runs: Finished runs.
        out: The file of the page.
        more: HTML for the end of the page.

    Returns:
        The names of the figures.

    Raises:
        UserError: There is no run, or a file of the user is in the place of the page or its figures.
    """
    if not runs:
        raise UserError("there is no finished run to report on")
    folder = out.with_name(f"{out.stem}-figures")
    refuse_links(folder)
    claim_page(out)
    if not out.exists():
        claim(folder, "", "folder of figures")
    report = Report(runs)
    write_page(out, "report.html", title="clipcil: report", more=Markup(more), **report.variables())
    files = {f"{shown.name}.png": shown.light.png for shown in report.figures}
    files |= {f"{shown.name}-dark.png": shown.dark.png for shown in report.figures}
    for name, content in files.items():
        write_bytes(folder / name, content)
    for path in folder.iterdir():  # a figure of an earlier report would be taken for one of this
        if path.name not in files and OWN_FIGURE.fullmatch(path.name):
            path.unlink()
    return [shown.name for shown in report.figures]


def _more_columns(standings: Sequence[Standing]) -> dict[str, str]:
    """A_B over pictures and backward transfer, each only where it says more than A_B and forgetting do."""
    runs = [run.values for standing in standings for run in standing.group.runs]
    found: dict[str, str] = {}
    if any(abs(values["last_weighted"] - values["last"]) > SAME for values in runs):
        found["last_weighted"] = Markup("A<sub>B</sub> over pictures")
    if any(abs(values["backward_transfer"] + values["forgetting"]) > SAME for values in runs):
        found["backward_transfer"] = "Backward transfer"
    return found


def _has_one_order(group: Group) -> bool:
    return len({run.order for run in group.runs}) == 1


def class_rows(group: Group, predictions: Sequence[TestAnswer]) -> list[list[str | Cell]]:
    """The accuracy of each class, and the class that it was most often mistaken for."""
    answers: dict[str, list[TestAnswer]] = {}
    for each in predictions:
        answers.setdefault(each.true, []).append(each)
    tasks = [task for task, size in enumerate(group.first.values["sizes"], start=1) for _ in range(size)]
    rows = []
    for place, name in enumerate(group.first.values.get("per_class", {})):  # in the order in which they were learnt
        own = answers.get(name, [])
        values = [run.values.get("per_class", {}).get(name) for run in group.runs]
        known = [value for value in values if value is not None]
        row: list[str | Cell] = [name]
        row += [Cell(str(task := tasks[min(place, len(tasks) - 1)]), task)] if _has_one_order(group) else []
        row.append(Cell(f"{fmean(known):.1f}", fmean(known)) if known else "—")
        row.append(Cell(str(count := len(own) // len(group.runs)), count) if own else "—")
        wrong = Counter(each.guess for each in own if not each.right).most_common(1)
        rows.append([*row, f"{wrong[0][0]} ({100 * wrong[0][1] / len(own):.0f} %)" if wrong else ""])
    return rows


def all_settings(group: Group) -> dict[str, Any]:
    """Every setting of a group, and the versions that its first run was measured with."""
    pairs = {**flatten(group.first.run, "run."), **flatten(group.first.settings)}
    pairs["run.seed"] = ", ".join(dict.fromkeys(str(run.seed) for run in group.runs))
    pairs["run.order"] = ", ".join(dict.fromkeys(run.order for run in group.runs))
    try:
        environment = read_json(group.first.folder / "environment.json")
    except UserError:
        environment = {}
    return pairs | (flatten(environment, "environment.") if isinstance(environment, dict) else {})


def _measured_on(standings: Sequence[Standing]) -> str:
    counts = sorted({run.test_pictures for standing in standings for run in standing.group.runs})
    said = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    held_out = any(standing.group.first.run.get("hold_out") for standing in standings)
    kind = "held-out training picture" if held_out else "test picture"
    return f"Measured on {said} {kind}{'s' * (counts[-1] != 1)}."


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:40]

"""The report: one HTML file that needs nothing else, and its figures as PNGs beside it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from clipcil.errors import UserError
from clipcil.files import refuse_links, write_bytes, write_text
from clipcil.paper.tables import BACKBONE
from clipcil.reading import open_regular, read_json
from clipcil.report import figures, html
from clipcil.report.compare import Group, Spread, flatten, group_runs, show
from clipcil.report.console import difference
from clipcil.report.runs import RunResult
from clipcil.report.strip import Strips
from clipcil.report.style import THEMES, Theme, look_of

TITLE = "clipcil: report"
Draw = Callable[[Theme], bytes]


class Report:
    """Collects the pieces of the page; figures go into it and into `files`, by their names."""

    def __init__(self, runs: Sequence[RunResult]) -> None:
        self.runs = list(runs)
        self.files: dict[str, bytes] = {}
        self.groups = group_runs(runs)
        self.strips = Strips()
        self.figures: list[str] = []

    def body(self) -> str:
        streams: dict[tuple[str, int, str, str], list[Group]] = {}
        for group in self.groups:
            streams.setdefault(group.stream, []).append(group)
        count = f"{len(self.runs)} run{'s' * (len(self.runs) != 1)}"
        parts = ["<h1>Class-incremental learning with CLIP</h1>", f'<p class="faint">{count}, measured by clipcil.</p>']
        titles = _titles(list(streams))
        if len(streams) > 1:
            links = "".join(f'<li><a href="#stream-{i}">{html.text(name)}</a></li>' for i, name in enumerate(titles))
            parts.append(f"<nav><ul>{links}</ul></nav>")
        for number, (title, groups) in enumerate(zip(titles, streams.values(), strict=True)):
            parts.append(self.section(f"stream-{number}", title, groups))
        return "\n".join(parts)

    def section(self, anchor: str, title: str, groups: list[Group]) -> str:
        """One stream of tasks: its table, the figures that compare methods, then each method."""
        what = f"{_slug(groups[0].first.data)}-{groups[0].first.tasks}tasks-{anchor.removeprefix('stream-')}"
        parts = [f'<h2 id="{anchor}">{html.text(title)}</h2>', comparison(groups), self.compared(what, groups)]
        parts.append("<h3>Each method</h3>")
        parts += [self.method(what, group, len(groups) == 1) for group in groups]
        return "\n".join(parts)

    def compared(self, what: str, groups: list[Group]) -> str:
        drawn = len(figures.best(groups))
        only = f" The {drawn} best of {len(groups)} by A_B." if drawn < len(groups) else ""
        band = " The band is ± one standard deviation over seeds." if any(len(g.runs) > 1 for g in groups) else ""
        said = f"A_k: the mean over tasks seen of the accuracy on each, after each task.{band}{only}"
        parts = [self.figure(f"{what}-accuracy", lambda t: figures.accuracy(groups, t), "Accuracy by task", said)]
        said = "Forgetting: best accuracy so far − accuracy at the end, the mean over all tasks but the last."
        parts.append(self.figure(f"{what}-forgetting", lambda t: figures.forgetting(groups, t), "Forgetting", said))
        if any(figures.has_drift(group) for group in groups):
            said = (
                "Drift: how far stored class Gaussians lie from the real features of old classes (test pictures, which "
                "no method sees), before and after calibration."
            )
            parts.append(self.figure(f"{what}-drift", lambda t: figures.drift(groups, t), "Drift", said))
        if any(run.timing for group in groups for run in group.runs):
            said = "Where the time went; what several runs share is paid for by the first."
            parts.append(self.figure(f"{what}-seconds", lambda t: figures.seconds(groups, t), "Seconds by phase", said))
        return f'<div class="figures">{"".join(parts)}</div>'

    def method(self, what: str, group: Group, is_open: bool) -> str:
        """The R matrix, confusion between tasks, pictures, notes and settings of one group."""
        name = f"{what}-{_slug(group.label)}-{self.groups.index(group)}"
        seeds = ", ".join(str(run.seed) for run in group.runs)
        over = "" if len(group.runs) == 1 else " Mean over seeds."
        parts = [
            self.figure(
                f"{name}-matrix",
                lambda theme: figures.matrix(group, theme),
                f"R matrix of {group.label}",
                f"R: accuracy on each task (across) after learning each task (down).{over}",
            ),
            self.figure(
                f"{name}-confusion",
                lambda theme: figures.confusion(group, theme),
                f"Confusion between tasks of {group.label}",
                "Confusion between tasks at the end: where the test pictures of each task went.",
            ),
        ]
        body = f'<div class="figures">{"".join(parts)}</div>{self.notes(group)}{self.strip(group)}{settings(group)}'
        head = f"{html.text(group.label)} <span class='faint'>A_B {group.last}, Ā {group.average}; seed {seeds}</span>"
        return html.details(head, body, is_open)

    def strip(self, group: Group) -> str:
        try:
            right, wrong = self.strips.strip(group.first)
        except UserError as error:
            return f'<p class="faint">No pictures are shown: {html.text(error)}.</p>'
        parts = ["<h3>Test pictures</h3>"]
        parts += [html.strip(shown) for shown in (right, wrong) if shown]
        return "".join(parts)

    def notes(self, group: Group) -> str:
        said = list(dict.fromkeys(note for run in group.runs for note in run.values["notes"]))
        return f"<h3>Notes</h3><ul>{''.join(f'<li>{html.text(note)}</li>' for note in said)}</ul>" if said else ""

    def figure(self, name: str, draw: Draw, alt: str, caption: str) -> str:
        """Draw in both themes, keep both as PNGs, and return the HTML that shows the one that suits."""
        drawn = {theme: draw(theme) for theme in THEMES}
        for theme, content in drawn.items():
            self.files[f"{name}{'' if theme == 'light' else '-dark'}.png"] = content
        self.figures.append(name)
        return html.picture(name, drawn["light"], drawn["dark"], alt, caption)


def write_report(runs: Sequence[RunResult], out: Path) -> list[str]:
    """Write `out` and the folder of its figures; returns their names."""
    if not runs:
        raise UserError("there is no finished run to report on")
    folder = out.with_name(f"{out.stem}-figures")
    _refuse_others_files(out, folder)
    report = Report(runs)
    write_text(out, html.page(TITLE, report.body()))
    for name, content in report.files.items():
        write_bytes(folder / name, content)
    return report.figures


def _refuse_others_files(out: Path, folder: Path) -> None:
    """A report replaces an earlier report and its figures; anything else there is somebody's own."""
    refuse_links(out, folder)
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file for the report, such as {out / 'report.html'}")
    if os.path.lexists(out):
        with open_regular(out) as file:
            ours = f"<title>{TITLE}</title>".encode() in file.read(4096)
        if not ours:
            raise UserError(f"{out} is there already and no report of clipcil; name another file with --out")
    elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} is there already and belongs to no report; name another file with --out")


def comparison(groups: Sequence[Group]) -> str:
    """Measured beside paper: a line for each group; the best of a column stands out."""
    papers = [group.printed() for group in groups]
    with_paper = any(papers)
    beside = ["paper", "Δ"] if with_paper else []
    head = ["Method", "Seeds", "A<sub>B</sub>", *beside, "Ā", *beside]
    head += ["A<sub>B</sub> over pictures", "Forgetting", "Backward transfer", "Seconds"]
    most = {key: max(getattr(group, key).mean for group in groups) for key in ("last", "average")}
    rows = []
    for group, paper in zip(groups, papers, strict=True):
        look = look_of(group.first.method)
        swatch = f'<span class="swatch" style="--light:{look.light};--dark:{look.dark}"></span>'
        cells = [f"{swatch}{html.text(group.label)}"]
        cells.append(str(len(group.runs)))
        for key in ("last", "average"):
            ours: Spread = getattr(group, key)
            theirs = getattr(paper, key) if paper else None
            cells.append(f'<td class="best">{ours}</td>' if ours.mean == most[key] and len(groups) > 1 else str(ours))
            if with_paper:
                cells += ["—" if theirs is None else f"{theirs:.2f}", difference(ours, theirs)]
        for key in ("last_weighted", "forgetting", "backward_transfer"):
            cells.append(str(group.spread(lambda run, key=key: float(run.values[key]))))  # type: ignore[misc]
        rows.append([*cells, f"{group.seconds:.1f}"])
    said = "Accuracies in percent. A<sub>B</sub>: at the end, mean over tasks; Ā: mean over all stages."
    if any(len(group.runs) > 1 for group in groups):
        said += " Mean ± standard deviation over seeds."
    if with_paper:
        named = sorted({paper.table for paper in papers if paper})
        said += f" Paper: {', '.join(named)}; Δ: measured − paper."
        if groups[0].first.backbone != BACKBONE:
            said += f" The paper measured with {BACKBONE}, not with {html.text(groups[0].first.backbone)}."
    return f'{html.table(head, rows)}<p class="faint">{said}</p>'


def settings(group: Group) -> str:
    """Every setting with its value, and the versions it ran with."""
    pairs = {**flatten(group.first.run, "run."), **flatten(group.first.settings)}
    pairs["run.seed"] = ", ".join(str(run.seed) for run in group.runs)
    pairs |= {f"environment.{key}": value for key, value in _environment(group.first.folder).items()}
    rows = [[html.text(key), html.text(show(value))] for key, value in pairs.items()]
    return html.details("Settings", html.table(["Setting", "Value"], rows))


def _environment(folder: Path) -> dict[str, object]:
    try:
        found = read_json(folder / "environment.json")
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


def _titles(streams: Sequence[tuple[str, int, str, str]]) -> list[str]:
    """What each stream is called; choices that tell two of them apart are named."""
    plain = [f"{data}, {tasks} tasks, {backbone}" for data, tasks, backbone, _ in streams]
    titles = []
    for name, stream in zip(plain, streams, strict=True):
        twins = [flatten(json.loads(other[3])) for other, title in zip(streams, plain, strict=True) if title == name]
        own = flatten(json.loads(stream[3]))
        keys = sorted({key for twin in twins for key in {*twin, *own} if twin.get(key) != own.get(key)})
        titles.append(f"{name}{''.join(f', {key} {show(own.get(key))}' for key in keys)}")
    return titles


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:40]

"""The report: one HTML file that needs nothing else, and its figures as PNGs beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from clipcil.errors import UserError
from clipcil.files import refuse_links, write_bytes
from clipcil.report import figures, html
from clipcil.report.compare import Group, group_runs
from clipcil.report.ranking import Entry, finding, rank, stream_titles
from clipcil.report.runs import RunResult
from clipcil.report.strip import Strips
from clipcil.report.style import THEMES, Theme
from clipcil.report.tables import classes, comparison, settings

TITLE = "clipcil: report"
OWN_FIGURE = re.compile(
    r"[a-z0-9-]*-\d+tasks-\d+-([a-z0-9-]+-)?(scores|accuracy|forgetting|drift|seconds|matrix|confusion)(-dark)?\.png"
)
"""The name of a figure of a report."""
Draw = Callable[[Theme], figures.Drawn]


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
        titles = stream_titles(list(streams))
        ranked = [rank(groups) for groups in streams.values()]
        findings = [html.text(finding(entries, title)) for entries, title in zip(ranked, titles, strict=True)]
        days = sorted({run.finished for run in self.runs} - {""})
        when = f", {days[0]}" if len(days) == 1 else f", {days[0]} to {days[-1]}" if days else ""
        number = sum(len(group.runs) for group in self.groups)  # a run that stands in two folders counts once
        count = f"{number} run{'s' * (number != 1)}"
        parts = ["<h1>Class-incremental learning with CLIP</h1>"]
        if len(streams) > 1:
            links = "".join(f'<li><a href="#stream-{i}">{said}</a></li>' for i, said in enumerate(findings))
            parts.append(f'<ul class="findings">{links}</ul>')
        else:
            parts.append(f'<p class="finding">{findings[0]} {_measured_on(ranked[0])}</p>')
        parts.append(f'<p class="faint">{count}, measured by clipcil{html.text(when)}.</p>')
        for number, (title, entries, said) in enumerate(zip(titles, ranked, findings, strict=True)):
            head = f'<h2 id="stream-{number}">{html.text(title)}</h2>'
            head += f'<p class="finding">{said} {_measured_on(entries)}</p>' if len(streams) > 1 else ""
            parts.append(head + self.section(str(number), entries))
        return "\n".join(parts)

    def section(self, number: str, entries: list[Entry]) -> str:
        """One stream of tasks: its table, the figures that compare methods, then each method."""
        first = entries[0].group.first
        what = f"{_slug(first.data)}-{first.tasks}tasks-{number}"
        parts = [comparison(entries), self.compared(what, entries), "<h3>Each method</h3>"]
        parts += [self.method(what, entry.group, len(entries) == 1) for entry in entries]
        return "\n".join(parts)

    def compared(self, what: str, entries: list[Entry]) -> str:
        """The figures that show all methods at once; a chart with one bar is none."""
        several = len(entries) > 1
        repeated = any(len(entry.group.runs) > 1 for entry in entries)
        band = " The band is ± one standard deviation over runs." if repeated else ""
        parts = []
        if several:
            ticks = " A tick is one run." if repeated else ""
            said = f"A_B with its 95 % interval over runs and test pictures.{ticks}"
            said += _only(entries, figures.MOST_SCORES)
            parts.append(self.figure(f"{what}-scores", lambda t: figures.scores(entries, t), "A_B", said))
        said = "A_k: the mean over tasks seen of the accuracy on each, after each task."
        said += f"{band}{_only(entries, figures.MOST_LINES)}"
        parts.append(self.figure(f"{what}-accuracy", lambda t: figures.accuracy(entries, t), "Accuracy by task", said))
        if several and entries[0].group.first.tasks > 1:
            said = "Forgetting: best accuracy so far − accuracy at the end, the mean over all tasks but the last."
            said += _only(entries, figures.MOST_BARS)
            parts.append(
                self.figure(f"{what}-forgetting", lambda t: figures.forgetting(entries, t), "Forgetting", said)
            )
        if moved := [entry for entry in entries if figures.has_drift(entry.group)]:
            said = "Drift: how far stored class Gaussians lie from the features that the same training pictures have "
            said += "today, before and after calibration. The experiment measures it; no method sees it."
            said += _only(moved, figures.MOST_DRIFTS)
            parts.append(self.figure(f"{what}-drift", lambda t: figures.drift(entries, t), "Drift", said))
        if several and any(run.timing for entry in entries for run in entry.group.runs):
            said = "Where the time went; what several runs share is paid for by the first."
            said += _only(entries, figures.MOST_BARS)
            parts.append(self.figure(f"{what}-seconds", lambda t: figures.seconds(entries, t), "Seconds", said))
        return f'<div class="figures">{"".join(parts)}</div>'

    def method(self, what: str, group: Group, is_open: bool) -> str:
        """The R matrix, confusion between tasks, classes, pictures, notes and settings of one group."""
        name = f"{what}-{_slug(group.label)}-{self.groups.index(group)}"
        over = "" if len(group.runs) == 1 else f" Mean over {group.over}."
        parts = []
        if group.first.tasks > 1:
            said = f"R: accuracy on each task (across) after learning each task (down).{over}"
            title = f"R matrix of {group.label}"
            parts.append(self.figure(f"{name}-matrix", lambda theme: figures.matrix(group, theme), title, said))
            said = f"Confusion between tasks at the end: where the test pictures of each task went.{over}"
            title = f"Confusion between tasks of {group.label}"
            parts.append(self.figure(f"{name}-confusion", lambda theme: figures.confusion(group, theme), title, said))
        body = f'<div class="figures">{"".join(parts)}</div>{self.notes(group)}{classes(group)}{self.strip(group)}'
        said = f"A_B {group.last}, Ā {group.average}; {group.over}"
        return html.details(
            f"{html.text(group.label)} <span class='faint'>{said}</span>", body + settings(group), is_open
        )

    def strip(self, group: Group) -> str:
        try:
            right, wrong = self.strips.strip(group.first)
        except UserError as error:
            return f'<p class="faint">No pictures are shown: {html.text(error)}.</p>'
        which = f" ({group.first.order}, seed {group.first.seed})" if len(group.runs) > 1 else ""
        sure = any(shown.prediction.probability is not None for shown in (*right, *wrong))
        first = "Mistakes, the most confident first" if sure else "Mistakes"
        parts = [f"<h3>{first}{html.text(which)}</h3>{html.strip(wrong)}"] if wrong else []
        parts += [f"<h3>Right answers{html.text(which)}</h3>{html.strip(right)}"] if right else []
        return "".join(parts)

    def notes(self, group: Group) -> str:
        said = list(dict.fromkeys(note for run in group.runs for note in run.values["notes"]))
        return f"<h3>Notes</h3><ul>{''.join(f'<li>{html.text(note)}</li>' for note in said)}</ul>" if said else ""

    def figure(self, name: str, draw: Draw, alt: str, caption: str) -> str:
        """Draw in both themes, keep both as PNGs, and return the HTML that shows the one that suits."""
        drawn = {theme: draw(theme) for theme in THEMES}
        for theme, content in drawn.items():
            self.files[f"{name}{'' if theme == 'light' else '-dark'}.png"] = content.png
        self.figures.append(name)
        return html.picture(name, drawn["light"], drawn["dark"], alt, caption)


def write_report(runs: Sequence[RunResult], out: Path, more: str = "") -> list[str]:
    """Write `out` and the folder of its figures; returns their names. `more` is HTML for the end of the page."""
    if not runs:
        raise UserError("there is no finished run to report on")
    folder = out.with_name(f"{out.stem}-figures")
    _refuse_others_files(out, folder)
    report = Report(runs)
    html.write_page(out, TITLE, report.body() + more)
    for name, content in report.files.items():
        write_bytes(folder / name, content)
    for path in folder.iterdir():  # a figure of an earlier report would be taken for one of this
        if path.name not in report.files and OWN_FIGURE.fullmatch(path.name):
            path.unlink()
    return report.figures


def _refuse_others_files(out: Path, folder: Path) -> None:
    """A report replaces an earlier report and its figures; anything else there belongs to the user."""
    refuse_links(folder)
    there = html.refuse_others_page(out)
    if not there and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} is there already and belongs to no report; name another file with --out")


def _only(entries: Sequence[Entry], most: int) -> str:
    """What a caption says where the figure does not show all methods."""
    return f" The {most} best of {len(entries)} by A_B." if len(entries) > most else ""


def _measured_on(entries: Sequence[Entry]) -> str:
    counts = sorted({run.test_pictures for entry in entries for run in entry.group.runs})
    said = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    held_out = any(entry.group.first.run.get("hold_out") for entry in entries)
    kind = "held-out training picture" if held_out else "test picture"
    return f"Measured on {said} {kind}{'s' * (counts[-1] != 1)}."


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:40]

"""The tables of a report, as HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from clipcil.errors import UserError
from clipcil.paper.tables import BACKBONE
from clipcil.reading import read_json
from clipcil.report import html
from clipcil.report.answers import TestAnswer, confused_pairs, read_predictions
from clipcil.report.compare import Group, Spread, flatten, show
from clipcil.report.console import difference
from clipcil.report.ranking import Entry, is_clear

SAME = 0.005
"""Numbers nearer than this are printed the same."""


def comparison(entries: Sequence[Entry]) -> str:
    """Measured beside paper: a line for each group. The best stands out only where its lead is more than noise."""
    papers = [entry.group.printed() for entry in entries]
    with_paper, several = any(papers), len(entries) > 1
    beside = ["paper", "Δ"] if with_paper else []
    head = ["Method", "Runs", "A<sub>B</sub>", "95 % interval", *(["behind the best"] if several else []), *beside]
    more = _more_columns(entries)
    head += ["Ā", *beside, *(name for _, name in more), "Forgetting", "Seconds"]
    clear = is_clear(entries)
    rows = []
    for entry, paper in zip(entries, papers, strict=True):
        group, look = entry.group, entry.look
        swatch = f'<span class="swatch" style="--light:{look.light};--dark:{look.dark}"></span>'
        cells = [f"{swatch}{html.text(group.label)}", html.cell(str(len(group.runs)), len(group.runs))]
        cells.append(html.cell(str(group.last), group.last.mean, "best" if clear and entry.is_best else ""))
        interval = entry.interval
        cells.append(html.cell(f"{interval.low:.1f} to {interval.high:.1f}" if interval else "—", group.last.mean))
        cells += [_behind(entry)] if several else []
        cells += _paper_cells(group.last, paper.last if paper else None) if with_paper else []
        cells.append(html.cell(str(group.average), group.average.mean))
        cells += _paper_cells(group.average, paper.average if paper else None) if with_paper else []
        for key in (*(key for key, _ in more), "forgetting"):
            value = _spread(group, key)
            cells.append(html.cell(str(value), value.mean))
        timed = all(run.timing.get("seconds") for run in group.runs)
        rows.append([*cells, html.cell(f"{group.seconds:.1f}", group.seconds) if timed else html.cell("—")])
    named = sorted({paper.table for paper in papers if paper})
    return f'{html.table(head, rows, sortable=several)}<p class="faint">{_said(entries, named)}</p>'


def _said(entries: Sequence[Entry], tables: Sequence[str]) -> str:
    group = entries[0].group
    said = ["Accuracies in percent. A<sub>B</sub>: at the end, mean over tasks; Ā: mean of A_k over all tasks k."]
    if any("=" in entry.group.label for entry in entries):
        said.append("In brackets: settings in which variants of a method differ; what most of them have is left out.")
    if any(len(entry.group.runs) > 1 for entry in entries):
        said.append("Mean ± standard deviation over class orders and seeds.")
        said.append("Interval: over runs and test pictures, 95 %.")
    else:
        said.append("Interval: over test pictures, 95 %; one class order and one seed cannot show their own spread.")
    if len(entries) > 1:
        said.append("Behind the best: paired difference with its 95 % interval; ≈ where it cannot be told from zero.")
    if tables:
        said.append(f"Paper: {', '.join(tables)}; Δ: measured − paper.")
        if group.first.backbone != BACKBONE:
            said.append(f"The paper measured with {BACKBONE}, not with {html.text(group.first.backbone)}.")
    return " ".join(said)


def _behind(entry: Entry) -> str:
    if entry.is_best:
        return html.cell("highest", 0.0)
    if entry.behind is None:
        return html.cell("—")
    noise = not entry.behind.excludes_zero
    return html.cell(f"{'≈ ' * noise}{entry.behind.signed}", entry.behind.mean, "noise" * noise)


def _paper_cells(ours: Spread, theirs: float | None) -> list[str]:
    if theirs is None:
        return [html.cell("—"), html.cell("—")]
    return [html.cell(f"{theirs:.2f}", theirs), html.cell(difference(ours, theirs), ours.mean - theirs)]


def _more_columns(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """A_B over pictures and backward transfer, each only where it says more than A_B and forgetting do."""
    runs = [run.values for entry in entries for run in entry.group.runs]
    found = []
    if any(abs(values["last_weighted"] - values["last"]) > SAME for values in runs):
        found.append(("last_weighted", "A<sub>B</sub> over pictures"))
    if any(abs(values["backward_transfer"] + values["forgetting"]) > SAME for values in runs):
        found.append(("backward_transfer", "Backward transfer"))
    return found


def _spread(group: Group, key: str) -> Spread:
    return group.spread(lambda run: float(run.values[key]))


def classes(group: Group) -> str:
    """Accuracy of each class, what it was most often mistaken for, and the pairs confused most often."""
    try:
        predictions = [each for run in group.runs for each in read_predictions(run.folder)]
    except UserError as error:
        predictions, missing = [], f'<p class="faint">No confused pairs are shown: {html.text(error)}.</p>'
    else:
        missing = ""
    rows = [_class_row(group, name, predictions) for name in group.first.values.get("per_class", {})]
    head = ["Class", *(["Task"] if _one_order(group) else []), "Accuracy, %", "Pictures", "Most often mistaken for"]
    parts = ["<h3>Classes</h3>", f'<div class="tall" tabindex="0">{html.table(head, rows, sortable=True)}</div>']
    if pairs := confused_pairs(predictions):
        lines = [
            [html.text(pair.true), html.text(pair.guess), html.cell(str(pair.times), pair.times), f"{pair.share:.0f} %"]
            for pair in pairs
        ]
        table = html.table(["Pictures of", "Taken for", "Times", "Share of the class"], lines, sortable=True)
        parts.append(f"<h3>Most often confused</h3>{table}")
    return "".join(parts) + missing


def _class_row(group: Group, name: str, predictions: Sequence[TestAnswer]) -> list[str]:
    own = [each for each in predictions if each.true == name]
    values = [run.values.get("per_class", {}).get(name) for run in group.runs]
    known = [value for value in values if value is not None]
    cells = [html.text(name)]
    if _one_order(group):
        cells.append(html.cell(str(task := _task_of(group, name)), task))
    cells.append(html.cell(f"{fmean(known):.1f}", fmean(known)) if known else html.cell("—"))
    cells.append(html.cell(str(count := len(own) // len(group.runs)), count) if own else "—")
    wrong = Counter(each.guess for each in own if not each.right).most_common(1)
    return [*cells, f"{html.text(wrong[0][0])} ({100 * wrong[0][1] / len(own):.0f} %)" if wrong else ""]


def _one_order(group: Group) -> bool:
    return len({run.order for run in group.runs}) == 1


def _task_of(group: Group, name: str) -> int:
    """The task of a class, from 1; `per_class` holds the classes in the order in which they were learnt."""
    place = list(group.first.values["per_class"]).index(name)
    for task, size in enumerate(group.first.values["sizes"], start=1):
        place -= size
        if place < 0:
            return task
    return len(group.first.values["sizes"])


def settings(group: Group) -> str:
    """Every setting with its value, and the versions it ran with."""
    pairs = {**flatten(group.first.run, "run."), **flatten(group.first.settings)}
    pairs["run.seed"] = ", ".join(dict.fromkeys(str(run.seed) for run in group.runs))
    pairs["run.order"] = ", ".join(dict.fromkeys(run.order for run in group.runs))
    pairs |= flatten(_environment(group.first.folder), "environment.")
    rows = [[html.text(key), html.text(show(value))] for key, value in pairs.items()]
    return html.details("Settings", html.table(["Setting", "Value"], rows))


def _environment(folder: Path) -> dict[str, object]:
    try:
        found = read_json(folder / "environment.json")
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}

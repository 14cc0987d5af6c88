"""The report: one HTML file that needs nothing else, and its figures as PNGs beside it."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from clipcil.errors import UserError, quoted
from clipcil.paper import BACKBONE
from clipcil.report import figures
from clipcil.report.answers import TestAnswer, Thumbnails, confused_pairs, read_predictions
from clipcil.report.compare import SAME, Group, Standing, Stream, flatten, group_runs, rank_groups, show, stream_titles
from clipcil.report.html import claim_page, write_page
from clipcil.report.runs import RunRecord
from clipcil.report.style import Theme
from clipcil.storage import claim, read_json, refuse_links, write_bytes

T = TypeVar("T")
FEWEST_CONFUSED = 3
"""Pictures of a class, in every run, that have to be mistaken for another to be a finding: one or two are chance."""
OWN_FIGURE = re.compile(
    r"[a-z0-9-]*-\d+tasks-\d+-([a-z0-9-]+-)?(scores|accuracy|forgetting|drift|seconds|matrix|confusion)(-dark)?\.png"
)
"""The name of a figure of a report."""


class PageFigure(NamedTuple):
    """A figure in both themes, and the number of methods that it compares, of which it may leave out some."""

    name: str
    kind: str
    light: figures.Figure
    dark: figures.Figure
    methods: int


class Report:
    """The variables of the template `report.html`; the figures are collected in `figures`."""

    def __init__(self, runs: Sequence[RunRecord]) -> None:
        self.runs = runs
        self.groups = group_runs(runs)
        self.thumbnails = Thumbnails()
        self.figures: list[PageFigure] = []

    def variables(self) -> dict[str, Any]:
        """The streams with everything that is shown about them."""
        streams: dict[Stream, list[Group]] = {}
        for group in self.groups:
            streams.setdefault(group.stream, []).append(group)
        named = zip(stream_titles(list(streams)), streams.values(), strict=True)
        shown = [self.stream(number, title, rank_groups(own)) for number, (title, own) in enumerate(named)]
        return {
            "title": f"clipcil: {headline(shown)}",
            "headline": headline(shown),
            "count": sum(len(group.runs) for group in self.groups),  # a run found in two folders counts once
            "days": sorted({run.timing.finished[:10] for run in self.runs} - {""}),
            "paper_backbone": BACKBONE,
            "most": figures.MOST_METHODS,
            "streams": shown,
        }

    def stream(self, number: int, title: str, standings: list[Standing]) -> dict[str, Any]:
        """One stream of tasks: the table of its methods, the best first, the figures that compare them, each method."""
        standings = sorted(standings, key=lambda standing: -standing.group.last.mean)
        first = standings[0].group.first
        runs = [run for standing in standings for run in standing.group.runs]
        name, several = f"{_slug(first.data)}-{first.tasks}tasks-{number}", len(standings) > 1
        compared = {  # a chart with one bar is left out
            "scores": standings if several else [],
            "accuracy": standings,
            "forgetting": standings if several and first.tasks > 1 else [],
            "drift": [each for each in standings if any(any(run.drift) for run in each.group.runs)],
            "seconds": standings if several and any(run.timing.seconds for run in runs) else [],
        }
        return {
            "title": title,
            "first": first,
            "standings": standings,
            "best": next(standing for standing in standings if standing.is_best),
            "tied": [each for each in standings if each.tied],
            "variants": any("=" in standing.group.label for standing in standings),
            "repeated": len(runs) > len(standings),
            "test_pictures": sorted({run.test_pictures for run in runs}),
            "papers": [standing.group.paper_result() for standing in standings],
            # Columns that would repeat A_B or forgetting are left out.
            "weighted": any(abs(run.last_weighted - run.last) > SAME for run in runs),
            "transfer": any(abs(run.backward_transfer + run.forgetting) > SAME for run in runs),
            "drift": drift_verdict([each.group for each in compared["drift"]]),
            "figures": [
                self.figure(name, kind, figures.best(shown, figures.MOST_METHODS[kind]), len(shown))
                for kind, shown in compared.items()
                if shown
            ],
            "methods": [self.method(name, standing.group) for standing in standings],
        }

    def figure(self, name: str, kind: str, what: Any, count: int = 1) -> PageFigure:
        """Draw a figure of standings or of a group in both themes."""
        light, dark = (getattr(figures, kind)(what, theme) for theme in ("light", "dark"))
        self.figures.append(PageFigure(f"{name}-{kind}", kind, light, dark, count))
        return self.figures[-1]

    def method(self, stream: str, group: Group) -> dict[str, Any]:
        """The R matrix, confusion between tasks, classes, pictures, notes and settings of one group."""
        name = f"{stream}-{_slug(group.label)}-{self.groups.index(group)}"
        kinds = ("matrix", "confusion") if group.first.tasks > 1 else ()
        predictions, no_pairs = _or_why(lambda: [each for run in group.runs for each in read_predictions(run.folder)])
        strips, no_pictures = _or_why(lambda: self.thumbnails.of(group.first))
        right, mistakes = strips or ([], [])
        fewest = FEWEST_CONFUSED * len(group.runs)
        return {
            "group": group,
            "figures": [self.figure(name, kind, group) for kind in kinds],
            "notes": list(dict.fromkeys(note for run in group.runs for note in run.notes)),
            "classes": class_rows(group, predictions or [], fewest),
            "confused": confused_pairs(predictions or [], fewest),
            "no_pairs": no_pairs,
            "no_pictures": no_pictures,
            "right": right,
            "mistakes": mistakes,
            "has_probabilities": any(answer.probability is not None for _, answer in (*right, *mistakes)),
            "settings": [(key, show(value)) for key, value in all_settings(group).items()],
        }


def write_report(runs: Sequence[RunRecord], out: Path) -> list[str]:
    """Write a page about finished runs to the file `out`, and its figures to a folder beside it; only an earlier report
    is replaced. Returns the names of the figures."""
    if not runs:
        raise UserError("there is no finished run to report on")
    folder = out.with_name(f"{out.stem}-figures")
    refuse_links(folder)
    claim_page(out)
    if not out.exists():
        claim(folder, "", "folder of figures")
    report = Report(runs)
    write_page(out, "report.html", **report.variables())
    files = {f"{each.name}.png": each.light.png for each in report.figures}
    files |= {f"{each.name}-dark.png": each.dark.png for each in report.figures}
    for name, content in files.items():
        write_bytes(folder / name, content)
    for path in folder.iterdir():  # a figure of an earlier report would be taken for one of this
        if path.name not in files and OWN_FIGURE.fullmatch(path.name):
            path.unlink()
    return [each.name for each in report.figures]


def write_model_page(out: Path, model: Any, folder: Path, small: Mapping[str, list[bytes]]) -> None:
    """Write a page about a `Classifier` in `folder`; `small` are the small pictures of each class, as JPEG files."""
    found, drawn = model.held_out_evaluation(), {}
    themes: tuple[Theme, Theme] = "light", "dark"
    if sum(one.held_out > 0 for one in model.history) > 1:
        drawn["lessons"] = [figures.lessons(model.history, theme) for theme in themes]
    if len(found.classes) > 1:
        drawn["answers"] = [figures.answers(found, theme) for theme in themes]
    values = {"model": model, "found": found, "drawn": drawn, "small": small, "most": figures.MOST_CLASSES}
    write_page(out, "model.html", title="clipcil: model", command=quoted(folder), **values)


def _or_why(read: Callable[[], T]) -> tuple[T | None, str]:
    """What can be read, or None and the reason why not."""
    try:
        return read(), ""
    except UserError as error:
        return None, str(error)


def headline(streams: Sequence[dict[str, Any]]) -> str:
    """The finding of a report: on one stream the lead of the best method, on several how often a method is the best."""
    if len(streams) > 1:
        best = Counter(stream["best"].group.label for stream in streams if len(stream["standings"]) > 1)
        if not best:
            return f"{len(streams)} streams of tasks"
        (label, times), among = best.most_common(1)[0], best.total()
        return f"{label} has the highest A_B on {times} of {among} stream{'s' * (among != 1)} of tasks"
    stream = streams[0]
    best, *others = stream["standings"]
    label, first = best.group.label, stream["first"]
    where = f"on {first.data}, {first.tasks} task{'s' * (first.tasks != 1)}"
    if not others:
        return f"{label} reaches {best.group.last.mean:.1f} % {where}"
    if best.interval is None:
        return f"{label} has the highest A_B {where}"
    if stream["tied"]:
        some = stream["tied"][0].group.label if len(stream["tied"]) == 1 else f"{len(stream['tied'])} other methods"
        return f"{label} cannot be told from {some} {where}"
    lead = best.group.last.mean - others[0].group.last.mean
    return f"{label} leads by {lead:.{0 if lead >= 3 else 1}f} points {where}"


def drift_verdict(groups: Sequence[Group]) -> str:
    """One sentence: how much of the drift of the stored class means calibration has removed after the last task."""
    found = []
    for group in groups:
        steps = [
            step for run in group.runs if (step := run.drift[-1]) and {"cosine_before", "cosine_after"} <= set(step)
        ]
        before, after = (
            fmean(step[key] for step in steps or [{key: 0.0}]) for key in ("cosine_before", "cosine_after")
        )
        if before > 0:
            what = f"removes {1 - after / before:.0%} of" if after <= before else f"adds {after / before - 1:.0%} to"
            found.append(f"{what} the drift of {group.label}")
    return f"After the last task, calibration {', '.join(found)}.".replace("%", " %") if found else ""


def class_rows(group: Group, predictions: Sequence[TestAnswer], fewest: int) -> list[dict[str, Any]]:
    """Of each class, in the order in which they were learnt: its name, task, mean accuracy (None where it has no test
    pictures), number of test pictures, and the class it was most often mistaken for with the share of its pictures,
    where that happened `fewest` times or more."""
    answers: dict[str, list[TestAnswer]] = {}
    for each in predictions:
        answers.setdefault(each.true, []).append(each)
    tasks = [task for task, size in enumerate(group.first.sizes, start=1) for _ in range(size)]
    rows = []
    for name, task in zip(group.first.per_class, tasks, strict=False):
        own = answers.get(name, [])
        known = [value for run in group.runs if (value := run.per_class.get(name)) is not None]
        wrong = Counter(each.guess for each in own if not each.right).most_common(1)
        rows.append(
            {
                "name": name,
                "task": task,
                "accuracy": fmean(known) if known else None,
                "pictures": len(own) // len(group.runs),
                "wrong": [(guess, 100 * times / len(own)) for guess, times in wrong if times >= fewest],
            }
        )
    return rows


def all_settings(group: Group) -> dict[str, Any]:
    """Every setting of a group, and the versions that its first run was measured with."""
    pairs = {**flatten(group.first.run, "run."), **flatten(group.first.settings)}
    pairs["run.seed"] = ", ".join(dict.fromkeys(str(run.seed) for run in group.runs))
    pairs["run.order"] = ", ".join(group.orders)
    try:
        environment = read_json(group.first.folder / "environment.json")
    except UserError:
        environment = {}
    return pairs | (flatten(environment, "environment.") if isinstance(environment, dict) else {})


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:40]

"""The report: one HTML file that needs nothing else, and its figures as PNGs beside it."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from clipcil.errors import UserError
from clipcil.paper import BACKBONE
from clipcil.report import figures
from clipcil.report.answers import TestAnswer, Thumbnails, confused_pairs, read_predictions
from clipcil.report.compare import SAME, Group, Standing, Stream, flatten, group_runs, rank_groups, show, stream_titles
from clipcil.report.html import claim_page, write_page
from clipcil.report.runs import RunRecord
from clipcil.storage import claim, read_json, refuse_links, write_bytes

T = TypeVar("T")
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
        return {
            "count": sum(len(group.runs) for group in self.groups),  # a run found in two folders counts once
            "days": sorted({run.timing.finished[:10] for run in self.runs} - {""}),
            "paper_backbone": BACKBONE,
            "most": figures.MOST_METHODS,
            "streams": [self.stream(number, title, rank_groups(own)) for number, (title, own) in enumerate(named)],
        }

    def stream(self, number: int, title: str, standings: list[Standing]) -> dict[str, Any]:
        """One stream of tasks: its table, the figures that compare methods, then each method."""
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
            "tied": sorted((each for each in standings if each.tied), key=lambda each: -each.group.last.mean),
            "variants": any("=" in standing.group.label for standing in standings),
            "repeated": len(runs) > len(standings),
            "test_pictures": sorted({run.test_pictures for run in runs}),
            "papers": [standing.group.paper_result() for standing in standings],
            # Columns that would repeat A_B or forgetting are left out.
            "weighted": any(abs(run.last_weighted - run.last) > SAME for run in runs),
            "transfer": any(abs(run.backward_transfer + run.forgetting) > SAME for run in runs),
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
        return {
            "group": group,
            "figures": [self.figure(name, kind, group) for kind in kinds],
            "notes": list(dict.fromkeys(note for run in group.runs for note in run.notes)),
            "classes": class_rows(group, predictions or []),
            "confused": confused_pairs(predictions or []),
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
    write_page(out, "report.html", title="clipcil: report", **report.variables())
    files = {f"{each.name}.png": each.light.png for each in report.figures}
    files |= {f"{each.name}-dark.png": each.dark.png for each in report.figures}
    for name, content in files.items():
        write_bytes(folder / name, content)
    for path in folder.iterdir():  # a figure of an earlier report would be taken for one of this
        if path.name not in files and OWN_FIGURE.fullmatch(path.name):
            path.unlink()
    return [each.name for each in report.figures]


def _or_why(read: Callable[[], T]) -> tuple[T | None, str]:
    """What can be read, or None and the reason why not."""
    try:
        return read(), ""
    except UserError as error:
        return None, str(error)


def class_rows(group: Group, predictions: Sequence[TestAnswer]) -> list[dict[str, Any]]:
    """Of each class, in the order in which they were learnt: its name, task, mean accuracy (None where it has no test
    pictures), number of test pictures, and the class it was most often mistaken for with the share of its pictures."""
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
                "wrong": [(guess, 100 * times / len(own)) for guess, times in wrong],
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

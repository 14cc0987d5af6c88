"""What the commands say: sentences and tables for people, and the same as JSON and CSV."""

import csv
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from clipcil.classifier.classifier import Classifier
from clipcil.classifier.folder import kept_statistics
from clipcil.classifier.lesson import Lesson
from clipcil.classifier.predict import Prediction
from clipcil.classifier.scoring import Calibration, Evaluation
from clipcil.classifier.sources import describe_skipped, skipped_files
from clipcil.data.dataset import Dataset
from clipcil.errors import counted, nearest, printable, quoted
from clipcil.methods.registry import find_method

SMALLEST = 0.005
"""Probabilities below this would be printed as 0 %; only the likeliest class is named all the same."""
STAGES = {"preprocess": "reading pictures", "encode": "encoding pictures", "check": "checking pictures"}
"""Labels of stages on the progress bar."""


def say(*lines: str) -> None:
    """Print sentences; on a terminal they wrap between words, in a file or a pipe each stays one line."""
    for line in map(printable, lines):
        if sys.stdout.isatty():
            width = max(20, shutil.get_terminal_size().columns)
            line = textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        print(line, flush=True)


def print_table(
    heads: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1, title: str | None = None
) -> None:
    """Print a table with its cells as they are: `:dog:` in a name stays text, and long names wrap.

    The first `left` columns are aligned to the left; the others are numbers.
    """
    table = Table(title=title or None, title_justify="left", box=None)
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    Console(highlight=False, markup=False, emoji=False).print(table)


@contextmanager
def progress_bar(quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Show `on_progress(stage, done, total)` as a moving bar on a terminal, and nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bars:
        bar = bars.add_task("", total=None)
        yield lambda stage, done, total: bars.update(
            bar, description=STAGES.get(stage, stage), completed=done, total=total or None
        )


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON for stdout; control characters, and those that its encoding lacks, are escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"

    def shown(letter: str) -> str:
        plain = printable(letter) == letter and letter.encode(encoding, "ignore")
        return letter if plain or letter == "\n" else json.dumps(letter)[1:-1]  # JSON has escaped \n inside texts

    return text if text.isascii() and "\x7f" not in text else "".join(map(shown, text))


# A lesson.


def plan(model: Classifier, dataset: Dataset, folder: Path) -> None:
    """Print the classes with their numbers of pictures, which of them are new, and which files are skipped."""
    counts = dataset.train.labels.bincount(minlength=len(dataset.classes)).tolist()
    places = model.learner.facts.find(dataset.classes)
    about = ("new" if place is None else "known: more pictures" for place in places)
    print_table(("class", "pictures", ""), zip(dataset.classes, counts, about, strict=True))
    if files := skipped_files(folder):
        more = [f"  … and {len(files) - 5} more"] if len(files) > 5 else []
        say(f"skipped: {describe_skipped(files)}", *(f"  {path}" for path in files[:5]), *more)


def preview(lesson: Lesson, skip_broken: bool) -> None:
    """Print what a lesson would skip."""
    broken = lesson.unreadable
    say(*(f"{'would be skipped' if skip_broken else 'note'}: {line}" for line in broken))
    if broken and not skip_broken:
        say(f"{counted(len(broken), 'picture')} cannot be read: learning would stop there, unless with --skip-broken")
    say(*_repeated(lesson, "would be skipped"), *_notes(lesson), "nothing was learnt (--dry-run)")


def lesson(model: Classifier, lesson: Lesson, folder: Path, quiet: bool = False) -> None:
    """Print the closing lines of a lesson, or one line with its result."""
    more = f", and more of {counted(len(lesson.again), 'known class', 'known classes')}" if lesson.again else ""
    total, known = len(model.classes), counted(len(model.classes), "class", "classes")
    result = f"learnt {counted(len(lesson.new), 'new class', 'new classes')}{more}; the model knows {known} now"
    if quiet:
        right = f"; accuracy {lesson.accuracy:.1%}" if total > 1 and lesson.accuracy is not None else ""
        say(f"{result}{right}")
        return
    say(*(f"skipped: {line}" for line in lesson.unreadable), *_repeated(lesson, "skipped"), result)
    held = f"; {lesson.held_out} held out" if lesson.held_out else ""
    say(f"trained on {lesson.pictures - lesson.held_out} of {counted(lesson.pictures, 'picture')}{held}")
    found, test = lesson.evaluation, f"clipcil test {quoted(folder)} FOLDER"
    if found.accuracy is None:
        say(f"no picture was kept for evaluation, so the accuracy on new pictures is not known; test some: {test}")
    elif total > 1:  # one class is always right
        say(accuracy(found, total, " left out one by one" if lesson.left_one_out else " held out"))
        say(f"pictures from elsewhere can be harder; test some: {test}")
    if found.confused:
        say(confusions(found, 3))
    if lesson.calibration.threshold is not None:
        say(lesson.calibration.when_unknown)
    say(*_notes(lesson), f"model in {quoted(folder)}; try it: clipcil predict {quoted(folder)} PICTURE")


def _repeated(lesson: Lesson, what: str) -> list[str]:
    if not lesson.repeated:
        return []
    return [f"{what}, because taught before: {counted(len(lesson.repeated), 'picture')} ({lesson.repeated[0]}, …)"]


def _notes(lesson: Lesson) -> list[str]:
    return [f"note: {warning}" for warning in lesson.warnings]


def accuracy(found: Evaluation, classes: int, how: str) -> str:
    """`accuracy over all 5 classes: 86.7% (95% interval 70% to 95%), measured on 30 pictures held out; 90.0% if it had
    to answer`."""
    (low, high), measured = found.interval, len(found.classes)
    over = "" if classes == 1 else "all " if how or measured == classes else f"{measured} of "
    forced = f"; {found.accuracy_if_forced:.1%} if it had to answer" if found.right_if_forced > found.right else ""
    return (
        f"accuracy over {over}{counted(classes, 'class', 'classes')}: {found.accuracy or 0:.1%} (95% interval"
        f" {low:.0%} to {high:.0%}), measured on {counted(found.pictures, 'picture')}{how}{forced}"
    )


def confusions(found: Evaluation, most: int) -> str:
    """`most often confused: lynx mistaken for cat (4 pictures), …`."""
    pairs = (f"{c.true} mistaken for {c.guess} ({counted(c.pictures, 'picture')})" for c in found.confused[:most])
    return f"most often confused: {', '.join(pairs)}"


# A test.


def test(model: Classifier, found: Evaluation) -> None:
    """Print accuracy, verdicts, confused pairs, and a table of the classes, the worst first."""
    say(*(f"cannot be read: {line}" for line in found.unreadable))
    strange = (
        f"; of {counted(found.unknown_pictures, 'picture')} of unknown classes {found.recognised or 0:.1%} recognised"
    )
    strange = strange if found.unknown_pictures else ""
    if found.classes:
        worst_first = sorted(found.classes, key=lambda one: one.accuracy or 0)
        rows = ((one.name, one.pictures, one.right, f"{one.accuracy or 0:.0%}") for one in worst_first)
        print_table(("class", "pictures", "right", ""), rows)
        say(accuracy(found, len(model.classes), "") + strange)
    else:
        say(f"no picture that can be read is of a class that the model knows{strange}")
    if found.confused:
        say(confusions(found, 5))
    if model.calibration.threshold is None:
        say(model.calibration.when_unknown)
    elif found.pictures:
        alarms, share = counted(found.false_alarms, "picture"), found.false_alarms / found.pictures
        say(f"false alarms: {alarms} of known classes called 'none of these' ({share:.1%})")
    if found.unknown_pictures:
        close = ((name, nearest(name, model.classes)) for name in found.unknown_classes[:5])
        say(*(f"note: the model does not know '{name}'{hint}" for name, hint in close if "did you mean" in hint))


def test_table(found: Evaluation) -> dict[str, Any]:
    """The result of a test as `--json` prints it."""
    counts = ("pictures", "right", "right_if_forced", "false_alarms", "unknown_pictures", "missed", "unreadable")
    plain = (*counts, "accuracy", "accuracy_if_forced", "recognised")
    table = {"unknown_missed" if key == "missed" else key: getattr(found, key) for key in plain}
    return table | {
        "interval": list(found.interval) if found.pictures else None,
        "classes": [vars(one) for one in found.classes],
        "confused": [vars(one) for one in found.confused],
        "mistakes": [
            {
                "picture": str(one.picture),
                "true": one.true,
                "guess": one.guess,
                "unknown": one.unknown,
                "probability": round(one.probability, 6),
            }
            for one in found.mistakes
        ],
    }


# What a model knows.


def show(summary: dict[str, Any], name: Path) -> None:
    """Print the summary of a model: what it knows and what it keeps of pictures."""
    rows = summary["classes"]
    classes, lessons = counted(len(rows), "class", "classes"), counted(summary["lessons"], "lesson")
    say(
        f"{quoted(name)}: {summary['method']} on {summary['backbone']} ({summary['fingerprint']}), {classes} from"
        f" {lessons}, {summary['bytes'] / 1e6:.1f} MB on disk",
        kept(summary),
    )
    right, total = (sum(row[key] for row in rows) for key in ("right", "measured_on"))
    if total and len(rows) > 1:  # one class is always right
        say(accuracy(Evaluation(total, right), len(rows), " kept for evaluation"))
    if summary["features_transported"]:
        moved = counted(summary["features_transported"], "picture")
        say(f"features of {moved} were transported when the tower changed; their part of the accuracy is an estimate")
    decides = {key: summary[key] for key in ("threshold", "novelty", "false_alarms")}
    say(Calibration(**decides, pictures=summary["held_out"]).when_unknown)
    shifts = any(row["moved"] is not None for row in rows)
    heads = ["class", "learnt", "newest", "pictures", "lesson", "right", *(["moved"] if shifts else [])]
    print_table(heads, (_class_cells(row)[: len(heads)] for row in rows), left=3)
    if shifts:
        say("moved: how far calibration has moved the mean of the class since it was learnt (1 − cosine)")


def _class_cells(row: dict[str, Any]) -> list[str]:
    name = row["name"] if row["name"] == row["taught_as"] else f"{row['name']} (taught as {row['taught_as']})"
    told = f"{row['right']} of {row['measured_on']}" if row["measured_on"] else "–"
    moved = "–" if row["moved"] is None else f"{row['moved']:.4f}"
    return [name, row["learnt"], row["newest"], str(row["pictures"]), str(row["task"]), told, moved]


def kept(summary: dict[str, Any]) -> str:
    """What a model holds of pictures."""
    parts = [
        (summary["pictures_kept"], "{} for the page of `clipcil serve`", "small picture"),
        (summary["exemplars_kept"], "the features of {} (exemplars)", "training picture"),
        (1, kept_statistics(find_method(summary["method"])), ""),
        (summary["features_kept"], "the features of {} for evaluation", "picture"),
    ]
    told = [text.format(counted(number, what)) for number, text, what in parts if number and text]
    start = "" if summary["pictures_kept"] else "keeps no picture" + ("; " if told else " and no features of pictures")
    return f"{start}keeps {' and '.join(told)}" if told else start


# Predictions: a line for each picture, as they come.


def print_line(picture: Path, prediction: Prediction) -> None:
    """`cat.jpg: cat 97%, lynx 2%`."""
    pairs = list(zip(prediction.names, prediction.probabilities, strict=True))
    shown = [pair for place, pair in enumerate(pairs) if not place or pair[1] >= SMALLEST]
    guesses = ", ".join(f"{name} {probability:.0%}" for name, probability in shown)
    if prediction.error is not None:
        guesses = f"cannot be read: {prediction.error}"
    elif prediction.unknown:
        guesses = f"none of these (nearest: {guesses})"
    print(printable(f"{picture}: {guesses}"))


def print_json(picture: Path, prediction: Prediction) -> None:
    """One JSON object."""
    value: dict[str, Any] = {"picture": str(picture)}
    if prediction.error is not None:
        value["error"] = prediction.error
    else:
        pairs = zip(prediction.names, prediction.probabilities, strict=True)
        value |= {"name": prediction.name, "unknown": prediction.unknown}
        value["classes"] = [{"name": name, "probability": round(p, 6)} for name, p in pairs]
    print(json_text(value))


def csv_printer(top: int) -> Callable[[Path, Prediction], None]:
    """Print the heading of a CSV table; returns the function that prints its lines, with `top` classes each."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    pairs = [column for place in range(1, top + 1) for column in (f"name_{place}", f"probability_{place}")]
    writer.writerow(["picture", "name", "unknown", "error", *pairs])

    def print_row(picture: Path, prediction: Prediction) -> None:
        unknown = str(prediction.unknown).lower() if prediction.error is None else ""
        cells: list[object] = [picture, prediction.name or "", unknown, prediction.error or ""]
        for name, probability in zip(prediction.names, prediction.probabilities, strict=True):
            cells += [name, f"{probability:.6f}"]
        writer.writerow([*map(printable, cells), *[""] * (4 + 2 * top - len(cells))])

    return print_row


# A run.


def results(values: Mapping[str, Any], folder: Path) -> None:
    """Print the paper's two numbers of a run, and where the rest is. `values` is what `results.json` holds."""
    say("A_B {last:.2f} %   Ā {average:.2f} %   (over pictures: {last_weighted:.2f} %)".format(**values))
    say("forgetting {forgetting:.2f}   backward transfer {backward_transfer:.2f}".format(**values))
    drift = (values.get("drift") or [None])[-1] or {}
    if {"cosine_before", "cosine_after", "cosine_floor"} <= drift.keys():  # a file of another version may lack them
        say(
            "drift of the stored means (1 − cosine) after the last task: {cosine_before:.4f} before calibration,"
            " {cosine_after:.4f} after, {cosine_floor:.4f} if it were perfect".format(**drift)
        )
    say(*(f"note: {note}" for note in values["notes"]))
    say(f"results in {folder}; clipcil report {quoted(folder)} makes a page of them")

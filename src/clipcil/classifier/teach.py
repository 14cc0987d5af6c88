"""`clipcil learn`: load or make the model, teach it, write it, and print the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from clipcil.classifier.classifier import Classifier, load
from clipcil.classifier.layout import check_swapped, describe_skipped, skipped_files
from clipcil.classifier.lesson import Lesson
from clipcil.classifier.model_folder import MODEL, hold_model, refuse_other_folders
from clipcil.classifier.small_pictures import SmallPictures
from clipcil.classifier.sources import read_source
from clipcil.classifier.wording import (
    accuracy_sentence,
    confusion_sentence,
    counted,
    print_table,
    say,
    unknown_sentence,
)
from clipcil.data.dataset import Dataset, drop_broken
from clipcil.data.names import same_name
from clipcil.data.pictures import BrokenPictureError
from clipcil.errors import UserError, printable, quoted


@dataclass(frozen=True)
class Request:
    """What `clipcil learn` was asked to do."""

    model: Path
    folder: Path
    choices: Mapping[str, str | int | None] = field(default_factory=dict)
    """Method and seed as given, None where not; they make a new model and must fit one that is there."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    backbone: str | None = None
    device: str = "cpu"
    hold_out: bool = True
    skip_broken: bool = False
    subfolders: bool = False
    quiet: bool = False


def teach(request: Request) -> Lesson:
    """Give a lesson to the model in a folder, and print the result.

    Raises:
        UserError: The model or the pictures cannot be used; nothing is changed.
    """
    check_swapped(request.model, request.folder, "clipcil learn")
    refuse_other_folders(request.model)
    dataset = read_source(request.folder, request.subfolders)
    with hold_model(request.model):
        model = _open(request)
        before = model.class_facts
        if not request.quiet:
            print_plan(model, dataset, request.folder)
        with progress_bar(request.quiet) as on_progress:
            try:
                lesson = model.learn(
                    dataset, hold_out=request.hold_out, skip_broken=request.skip_broken, on_progress=on_progress
                )
            except BrokenPictureError as error:
                raise UserError(f"{error}, or leave out all such pictures with --skip-broken") from error
        model.write(request.model, keep_previous=True)
        SmallPictures(request.model).follow(before)
    report(model, lesson, request.model)
    return lesson


def dry_run(request: Request) -> None:
    """Print what `teach` would learn, and learn nothing."""
    check_swapped(request.model, request.folder, "clipcil learn")
    refuse_other_folders(request.model)
    dataset = read_source(request.folder, request.subfolders)
    model = _open(request)
    print_plan(model, dataset, request.folder)
    with progress_bar(request.quiet) as on_progress:
        whole, broken = drop_broken(dataset, on_progress)
    for line in broken:
        say(f"{'would be skipped' if request.skip_broken else 'note'}: {line}")
    model._check_prompts(dataset)
    if broken and not request.skip_broken:
        say(f"{counted(len(broken), 'picture')} cannot be read: learning would stop there, unless with --skip-broken")
    lesson = Lesson()
    model._plan(whole, lesson)
    say_repeated(lesson, "would be skipped")
    for warning in lesson.warnings:
        say(f"note: {warning}")
    say("nothing was learnt (--dry-run)")


@contextmanager
def progress_bar(quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Show `on_progress(stage, done, total)` as a moving bar on a terminal, and nothing elsewhere."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda stage, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=None)

        def show(stage: str, done: int, total: int) -> None:
            bars.update(bar, description=STAGES.get(stage, stage), completed=done, total=total or None)

        yield show


STAGES = {"preprocess": "reading pictures", "encode": "encoding pictures", "check": "checking pictures"}
"""Labels of stages on the progress bar."""


def _open(request: Request) -> Classifier:
    folder, given = request.model, {key: value for key, value in request.choices.items() if value is not None}
    if not (folder / MODEL).exists():
        backbone = request.backbone or "mini"
        return Classifier(backbone=backbone, device=request.device, **given, **request.settings)  # type: ignore[arg-type]
    if request.settings:
        raise UserError(f"{folder} has its settings already; --set is for a new model")
    model = load(folder, backbone=request.backbone, device=request.device)
    facts = model.facts()
    for key, value in given.items():
        if getattr(facts, key) != value:
            raise UserError(f"{folder} has {key} '{getattr(facts, key)}', not '{value}'; leave --{key} out")
    return model


def print_plan(model: Classifier, dataset: Dataset, folder: Path) -> None:
    """Print the classes with their numbers of pictures, which of them are new, and which files are skipped."""
    counts = dataset.train.labels.bincount(minlength=len(dataset.classes)).tolist()
    known = {same_name(name) for name in model.classes}
    table = Table("class", "pictures", "", box=None)
    table.columns[1].justify = "right"
    for name, number in zip(dataset.classes, counts, strict=True):
        table.add_row(printable(name), str(number), "known: more pictures" if same_name(name) in known else "new")
    print_table(table)
    if files := skipped_files(folder):
        say(f"skipped: {describe_skipped(files)}")
        for path in files[:5]:
            say(f"  {path}")
        if len(files) > 5:
            say(f"  … and {len(files) - 5} more")


def say_repeated(lesson: Lesson, what: str) -> None:
    if lesson.repeated:
        say(f"{what}, because taught before: {counted(len(lesson.repeated), 'picture')} ({lesson.repeated[0]}, …)")


def report(model: Classifier, lesson: Lesson, folder: Path) -> None:
    """The closing lines."""
    for line in lesson.unreadable:
        say(f"skipped: {line}")
    say_repeated(lesson, "skipped")
    more = f", and more of {counted(len(lesson.again), 'known class', 'known classes')}" if lesson.again else ""
    total, known = len(model.classes), counted(len(model.classes), "class", "classes")
    say(f"learnt {counted(len(lesson.new), 'new class', 'new classes')}{more}; the model knows {known} now")
    held = f"; {lesson.held_out} held out" if lesson.held_out else ""
    say(f"trained on {lesson.pictures - lesson.held_out} of {counted(lesson.pictures, 'picture')}{held}")
    found, how = lesson.evaluation, lesson.calibration
    if found.accuracy is None:
        say(
            "no picture was kept for evaluation, so the accuracy on new pictures is not known; measure it: clipcil test"
            f" {quoted(folder)} FOLDER"
        )
    elif total > 1:  # one class is always right
        say(accuracy_sentence(found, total, " left out one by one" if lesson.left_one_out else " held out"))
        say(f"pictures from elsewhere can be harder; measure them: clipcil test {quoted(folder)} FOLDER")
    if found.confused:
        say(confusion_sentence(found))
    if how.threshold is not None:
        say(unknown_sentence(how))
    for warning in lesson.warnings:
        say(f"note: {warning}")
    say(f"model in {quoted(folder)}; ask it: clipcil predict {quoted(folder)} PICTURE")

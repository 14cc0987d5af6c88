"""From the words of `clipcil learn` to a lesson: load or make the model, teach it, write it, say what came of it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from clipcil.classifier.classifier import Classifier, load
from clipcil.classifier.lesson import Lesson
from clipcil.classifier.model_folder import MODEL, hold_model, refuse_other_folders
from clipcil.classifier.sources import loose_pictures, read_source
from clipcil.errors import UserError, printable
from clipcil.experiment.display import Display


def teach(
    folder: Path,
    source: Path,
    choices: Mapping[str, str | int | None],
    settings: Mapping[str, Any],
    hold_out: bool,
    skip_broken: bool,
    backbone: str | None,
    device: str,
    display: Display,
) -> Lesson:
    """`choices`: method and seed as given, None where not; they make a new model and must fit one that is there."""
    refuse_other_folders(folder)
    dataset = read_source(source)
    with hold_model(folder):
        model = _open(folder, choices, settings, backbone, device)
        known = set(model.classes)
        counts = dataset.train.labels.bincount(minlength=len(dataset.classes)).tolist()
        if type(display) is not Display:  # the plain one says nothing
            _print_classes(model, dataset.classes, counts)
        if loose := loose_pictures(source):
            display.tell(f"passed over: {loose} pictures in {source} itself, in no class folder")
        what = f"{folder}: {len(known)} classes, {len(dataset.classes)} handed over, {len(dataset.train)} pictures"
        display.start(what, 1)
        try:
            lesson = model.learn(dataset, hold_out=hold_out, skip_broken=skip_broken, on_progress=display.progress)
            model.write(folder)
        finally:
            display.stop()
    report(model, lesson, folder)
    return lesson


def _open(
    folder: Path,
    choices: Mapping[str, str | int | None],
    settings: Mapping[str, Any],
    backbone: str | None,
    device: str,
) -> Classifier:
    given = {key: value for key, value in choices.items() if value is not None}
    if not (folder / MODEL).exists():
        return Classifier(backbone=backbone or "mini", device=device, **given, **settings)  # type: ignore[arg-type]
    if settings:
        raise UserError(f"{folder} has its settings already; --set is for a new model")
    model = load(folder, backbone=backbone, device=device)
    facts = model.facts()
    for key, value in given.items():
        if getattr(facts, key) != value:
            raise UserError(f"{folder} has {key} '{getattr(facts, key)}', not '{value}'; leave --{key} out")
    return model


def _print_classes(model: Classifier, names: list[str], counts: list[int]) -> None:
    table = Table("class", "pictures", "", box=None)
    table.columns[1].justify = "right"
    known = {name.casefold() for name in model.classes}
    for name, count in zip(names, counts, strict=True):
        table.add_row(printable(name), str(count), "known: more pictures" if name.casefold() in known else "new")
    Console(highlight=False, markup=False).print(table)


def report(model: Classifier, lesson: Lesson, folder: Path) -> None:
    """The closing lines."""
    for line in lesson.left_out:
        say(f"left out: {line}")
    total = sum(lesson.new.values()) + sum(lesson.again.values())
    more = f", and more pictures of {count(len(lesson.again), 'known class', 'known classes')}" if lesson.again else ""
    known = count(len(model.classes), "class", "classes")
    say(f"learnt {count(len(lesson.new), 'new class', 'new classes')}{more}; the model knows {known} now")
    held = f"; {lesson.held_out} held out" if lesson.held_out else ""
    say(f"trained on {total - lesson.held_out} of {count(total, 'picture')}{held}")
    found, how = lesson.evaluation, lesson.calibration
    if found.accuracy is None:
        say("no picture was kept to measure on, so nothing is known about how well new pictures are told")
    else:
        low, high = found.interval
        say(
            f"accuracy over all {known}: {found.accuracy:.1%} (95 % interval {low:.0%} to {high:.0%}), measured on"
            f" {count(found.pictures, 'picture')} {'left out one by one' if lesson.left_one_out else 'held out'}"
        )
    if found.confused:
        pairs = ", ".join(f"{c.true} taken for {c.guess} ({c.pictures})" for c in found.confused[:3])
        say(f"most confused: {pairs}")
    if how.threshold is not None:
        say(
            f"'none of these' where the likeliest class is below {how.threshold:.1%}; expected for"
            f" {how.false_alarms or 0:.1%} of pictures of known classes"
        )
    for warning in lesson.warnings:
        say(f"note: {warning}")
    say(f"model in {folder}; ask it: clipcil predict {shlex.quote(str(folder))} PICTURE")


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 picture`, `2 pictures`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def say(line: str) -> None:
    """Print a line; names in it may hold anything."""
    print(printable(line))

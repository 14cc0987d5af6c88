"""From the words of `clipcil learn` to a lesson: load or make the model, teach it, write it, say what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from clipcil.classifier.classifier import Classifier, load
from clipcil.classifier.lesson import Lesson
from clipcil.classifier.model_folder import LOCK, MODEL
from clipcil.classifier.sources import loose_pictures, read_source
from clipcil.classifier.unknown import ENOUGH
from clipcil.errors import UserError
from clipcil.experiment.display import Display
from clipcil.files import run_lock


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
    dataset = read_source(source)
    with held(folder):
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
            lesson = model.learn(dataset, hold_out=hold_out, skip_broken=skip_broken, display=display)
            model.write(folder)
        finally:
            display.stop()
    report(model, lesson, folder)
    return lesson


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The lock of a model's folder; a folder made for nothing is taken away again."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder for the model")
    fresh = not folder.exists()
    with run_lock(folder):
        try:
            yield
        finally:
            if fresh and not (folder / MODEL).exists():
                (folder / LOCK).unlink(missing_ok=True)
                if not any(folder.iterdir()):
                    folder.rmdir()


def _open(
    folder: Path,
    choices: Mapping[str, str | int | None],
    settings: Mapping[str, Any],
    backbone: str | None,
    device: str,
) -> Classifier:
    given = {key: value for key, value in choices.items() if value is not None}
    if not (folder / MODEL).exists():
        others = [path.name for path in folder.iterdir() if not path.name.startswith((".", "weights"))]
        if others:
            raise UserError(f"{folder} holds other things ({sorted(others)[0]}) and no model; name a new folder")
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
        table.add_row(name, str(count), "known: more pictures" if name.casefold() in known else "new")
    Console(highlight=False, markup=False).print(table)


def report(model: Classifier, lesson: Lesson, folder: Path) -> None:
    """The closing lines."""
    for line in lesson.left_out:
        print(f"left out: {line}")
    total = sum(lesson.new.values()) + sum(lesson.again.values())
    print(f"learnt {len(lesson.new)} new classes and more of {len(lesson.again)}; it knows {len(model.classes)} now")
    how = lesson.calibration
    if lesson.accuracy is None:
        print(f"trained on all {total} pictures; none were held out, so nothing is known about new pictures")
    else:
        print(
            f"trained on {total - lesson.held_out} of {total} pictures; of the {lesson.held_out} held out,"
            f" {lesson.accuracy:.1%} are told right among all {len(model.classes)} classes"
        )
    if how.threshold is None:
        print("no threshold for 'none of these': no pictures were ever held out, so nothing will be called unknown")
    else:
        few = "" if how.pictures >= ENOUGH else f" (fewer than {ENOUGH}: the threshold is the lowest of them)"
        print(
            f"threshold for 'none of these': likeliest class below {how.threshold:.1%}; false alarms on"
            f" {how.pictures} held-out pictures of known classes: {how.false_alarms or 0:.1%}{few}"
        )
    print(f"model in {folder}; ask it: clipcil predict {folder} PICTURE")

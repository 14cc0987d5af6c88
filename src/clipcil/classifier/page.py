"""Self-contained HTML pages about a model: its lessons and classes, and the result of a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from clipcil.classifier.classifier import Classifier
from clipcil.classifier.facts import KnownClass
from clipcil.classifier.scoring import Answer, Evaluation
from clipcil.classifier.wording import counted
from clipcil.data.pictures import decode, thumbnail
from clipcil.data.sources import as_picture
from clipcil.errors import UserError
from clipcil.intervals import wilson_interval
from clipcil.report import html

SHOWN = 120
"""Maximum number of mistakes shown with their picture: with more, a page takes long to load."""
THUMBNAIL = 112
"""Pixels of the longer side of a picture on the page."""
FAINT = Markup('{} <span class="faint">{}</span>')


def write_model_page(model: Classifier, out: Path) -> None:
    """Write a page about a model: its lessons with the accuracy over all classes after each, and its classes.

    Args:
        model: A model that was taught.
        out: The file.
    """
    found = model.held_out_evaluation()
    lessons = [
        [
            FAINT.format(number, lesson.when[:16].replace("T", " ")),
            *map(str, (lesson.new, lesson.again, lesson.pictures, lesson.classes)),
            *_share(lesson.right, lesson.held_out),
        ]
        for number, lesson in enumerate(model.history, 1)
    ]
    html.write_page(
        out,
        "model.html",
        title="clipcil: model",
        heading=f"{counted(len(model.classes), 'class', 'classes')}, learnt in {counted(len(model.history), 'lesson')}",
        headline=_headline(found),
        model=repr(model),
        note=_carried_note(model),
        lessons=lessons,
        classes=class_table(model.class_facts),
        confused=_confused(found),
    )


def write_test_page(model: Classifier, found: Evaluation, source: str, out: Path) -> None:
    """Write a page about a test: accuracy, each class, confused pairs, and the mistakes, the most confident first.

    Args:
        model: The model that was tested.
        found: What `model.test` returned.
        source: The folder of the test pictures, as the page is to call it.
        out: The file.
    """
    worst_first = sorted(found.classes, key=lambda result: result.accuracy or 0)
    html.write_page(
        out,
        "test.html",
        title="clipcil: test",
        headline=_headline(found),
        source=source,
        model=repr(model),
        verdicts=_verdicts(found),
        mistakes=[_mistake(answer) for answer in found.mistakes[:SHOWN]],
        count=len(found.mistakes),
        classes=[[one.name, str(one.pictures), *_share(one.right, one.pictures)] for one in worst_first],
        confused=_confused(found),
        unreadable=found.unreadable,
    )


def class_table(known: Sequence[KnownClass]) -> Markup:
    """When each class was learnt, from how many pictures, and its accuracy, as HTML."""
    rows = [[one.name, one.learnt, one.newest, str(one.pictures), *_share(one.right, one.held_out)] for one in known]
    return html.table(["Class", "Learnt", "Newest", "Pictures", "Accuracy", "95% interval"], rows)


def _headline(found: Evaluation) -> str:
    if found.accuracy is None:
        return "No picture of a known class was measured"
    low, high = found.interval
    return (
        f"{found.accuracy:.1%} of {counted(found.pictures, 'picture')} are classified correctly"
        f" (95% interval {low:.0%} to {high:.0%})"
    )


def _verdicts(found: Evaluation) -> list[str]:
    lines = []
    if found.pictures:
        share = f"{found.false_alarms / found.pictures:.1%}"
        lines.append(f"False alarms: {share} of the pictures of known classes were called “none of these”.")
    if found.unknown_pictures:
        share = f"{found.missed / found.unknown_pictures:.1%}"
        unknown = counted(found.unknown_pictures, "picture")
        lines.append(f"Misses: {share} of {unknown} of classes that the model does not know were given a class.")
    return lines


def _confused(found: Evaluation) -> list[list[str]]:
    return [[pair.true, pair.guess, str(pair.pictures)] for pair in found.confused[:50]]


def _mistake(answer: Answer) -> dict[str, Any]:
    name = str(answer.picture) if isinstance(answer.picture, Path) else answer.true
    try:
        jpeg = thumbnail(decode(as_picture(answer.picture), answer.true), THUMBNAIL)
    except UserError:
        jpeg = b""
    return {"answer": answer, "name": name, "jpeg": jpeg}


def _share(right: int, total: int) -> list[str]:
    if not total:
        return ["–", "–"]
    low, high = wilson_interval(right, total)
    return [FAINT.format(f"{right / total:.0%}", f"({right} of {total})"), f"{low:.0%} to {high:.0%}"]


def _carried_note(model: Classifier) -> str:
    count = model.features_transported
    if not count:
        return ""
    return (
        f" The features of {counted(count, 'picture')} of earlier lessons were transported by a map when the tower"
        " changed, because those pictures are gone; their part of the accuracy is an estimate."
    )

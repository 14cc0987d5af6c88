"""Self-contained HTML pages about a model: its lessons and classes, and the result of a test."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from clipcil.classifier.classifier import Classifier
from clipcil.classifier.evaluation import Answer, ClassResult, Evaluation
from clipcil.classifier.facts import KnownClass
from clipcil.classifier.wording import counted
from clipcil.data.given import as_picture
from clipcil.data.pictures import decode
from clipcil.errors import UserError
from clipcil.intervals import wilson_interval
from clipcil.report import html

SHOWN = 120
"""Maximum number of mistakes shown with their picture: with more, a page takes long to load."""
THUMBNAIL = 112
"""Pixels of the longer side of a picture on the page."""


def write_model_page(model: Classifier, out: Path) -> None:
    """Write a page about a model: its lessons with the accuracy over all classes after each, and its classes.

    Args:
        model: A model that was taught.
        out: The file.
    """
    found = model.held_out_evaluation()
    parts = [
        f"<h1>{html.text(counted(len(model.classes), 'class', 'classes'))}, learnt in"
        f" {counted(len(model.history), 'lesson')}</h1>",
        f"<p>{_headline(found)}</p>",
        f'<p class="faint">{html.text(repr(model))}. Measured on the pictures kept for evaluation, each scored as if it'
        f" had not been learnt; after every lesson all of them are scored again.{_carried_note(model)}</p>",
        "<h2>Lessons</h2>",
        _lesson_table(model),
        "<h2>Classes</h2>",
        class_table(model.class_facts),
        _confusions(found),
    ]
    html.write_page(out, "clipcil: model", "\n".join(parts))


def write_test_page(model: Classifier, found: Evaluation, source: str, out: Path) -> None:
    """Write a page about a test: accuracy, each class, confused pairs, and the mistakes, the most confident first.

    Args:
        model: The model that was tested.
        found: What `model.test` returned.
        source: The folder of the test pictures, as the page is to call it.
        out: The file.
    """
    parts = [
        f"<h1>{_headline(found)}</h1>",
        f'<p class="faint">Test pictures: {html.text(source)}. {html.text(repr(model))}.</p>',
        _verdicts(found),
        _mistakes(found.mistakes),
        "<h2>Classes, the worst first</h2>",
        _result_table(sorted(found.classes, key=lambda result: result.accuracy or 0)),
        _confusions(found),
    ]
    if found.unreadable:
        lines = "".join(f"<li>{html.text(line)}</li>" for line in found.unreadable)
        parts.append(
            html.details(
                counted(len(found.unreadable), "picture that cannot be read", "pictures that cannot be read"),
                f"<ul>{lines}</ul>",
            )
        )
    html.write_page(out, "clipcil: test", "\n".join(parts))


def class_table(known: Sequence[KnownClass]) -> str:
    """When each class was learnt, from how many pictures, and its accuracy."""
    rows = [
        [*map(html.text, (one.name, one.learnt, one.newest)), str(one.pictures), *_share(one.right, one.held_out)]
        for one in known
    ]
    return html.table(["Class", "Learnt", "Newest", "Pictures", "Accuracy", "95% interval"], rows)


def _result_table(results: Sequence[ClassResult]) -> str:
    rows = [[html.text(one.name), str(one.pictures), *_share(one.right, one.pictures)] for one in results]
    return html.table(["Class", "Pictures", "Accuracy", "95% interval"], rows)


def _lesson_table(model: Classifier) -> str:
    rows = [
        [
            f"{number} <span class='faint'>{html.text(lesson.when[:16].replace('T', ' '))}</span>",
            str(lesson.new),
            str(lesson.again),
            str(lesson.pictures),
            str(lesson.classes),
            *_share(lesson.right, lesson.held_out),
        ]
        for number, lesson in enumerate(model.history, 1)
    ]
    head = [
        "Lesson",
        "New classes",
        "Taught more",
        "Pictures",
        "Classes after it",
        "Accuracy over all",
        "95% interval",
    ]
    return html.table(head, rows)


def _headline(found: Evaluation) -> str:
    if found.accuracy is None:
        return "No picture of a known class was measured"
    low, high = found.interval
    return (
        f"{found.accuracy:.1%} of {counted(found.pictures, 'picture')} are classified correctly"
        f" (95% interval {low:.0%} to {high:.0%})"
    )


def _verdicts(found: Evaluation) -> str:
    lines = []
    if found.pictures:
        share = f"{found.false_alarms / found.pictures:.1%}"
        lines.append(f"False alarms: {share} of the pictures of known classes were called “none of these”.")
    if found.unknown_pictures:
        share = f"{found.missed / found.unknown_pictures:.1%}"
        unknown = counted(found.unknown_pictures, "picture")
        lines.append(f"Misses: {share} of {unknown} of classes that the model does not know were given a class.")
    return "".join(f"<p>{line}</p>" for line in lines)


def _confusions(found: Evaluation) -> str:
    if not found.confused:
        return ""
    rows = [[html.text(pair.true), html.text(pair.guess), str(pair.pictures)] for pair in found.confused[:50]]
    return "<h2>Most often confused</h2>" + html.table(["True class", "Predicted as", "Pictures"], rows)


def _mistakes(mistakes: Sequence[Answer]) -> str:
    if not mistakes:
        return "<p>There is no mistake.</p>"
    items = "".join(_mistake(answer) for answer in mistakes[:SHOWN])
    more = f' <span class="faint">the first {SHOWN} of {len(mistakes)}</span>' if len(mistakes) > SHOWN else ""
    return f'<h2>Mistakes, the most confident first{more}</h2><ul class="strip">{items}</ul>'


def _mistake(answer: Answer) -> str:
    name = str(answer.picture) if isinstance(answer.picture, Path) else answer.true
    try:
        image = f'<img src="{html.data_url("image/jpeg", _thumbnail(answer))}" alt="{html.text(answer.true)}">'
    except UserError:
        image = ""
    unknown = "none of these; nearest " if answer.unknown else ""
    said = f"{unknown}{html.text(answer.guess)} {answer.probability:.0%}<br>is: {html.text(answer.true)}"
    return f'<li title="{html.text(name)}">{image}<span class="wrong">{said}</span></li>'


def _thumbnail(answer: Answer) -> bytes:
    image = decode(as_picture(answer.picture), answer.true)
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=82)
    return buffer.getvalue()


def _share(right: int, total: int) -> list[str]:
    if not total:
        return ["–", "–"]
    low, high = wilson_interval(right, total)
    return [f"{right / total:.0%} <span class='faint'>({right} of {total})</span>", f"{low:.0%} to {high:.0%}"]


def _carried_note(model: Classifier) -> str:
    count = model.features_transported
    if not count:
        return ""
    return (
        f" The features of {counted(count, 'picture')} of earlier lessons were transported by a map when the tower"
        " changed, because those pictures are gone; their part of the accuracy is an estimate."
    )

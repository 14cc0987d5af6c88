"""The contents of `model.toml`: everything about a model except its weights, checked when it is read."""

from __future__ import annotations

import datetime
import re
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, Field

import clipcil
from clipcil.classifier.lesson import LessonRecord
from clipcil.classifier.scoring import Calibration
from clipcil.data.names import check_template
from clipcil.errors import UserError, printable
from clipcil.settings import Count, Text, typed

FORMAT = "1.1"
"""Version of the folder. A later minor one only adds; a later major one cannot be read by this program."""
WEIGHTS = re.compile(r"weights-[0-9a-f]{12}\.safetensors")
"""Names of files of weights; the digits are the beginning of the file's SHA-256."""


def _day(text: str) -> str:
    if text:
        datetime.date.fromisoformat(text)
    return text


Day = Annotated[str, Field(max_length=40), AfterValidator(_day)]
"""A day as 2026-01-31, or nothing."""
Name = Annotated[str, Field(min_length=1, max_length=1000)]


@dataclass
class KnownClass:
    """A class the model knows."""

    name: Name
    """Its name."""
    text: Name
    """The name it was taught under: the text inside its prompt. Renaming changes `name` alone, so no score moves."""
    learnt: Day
    """The day of its first pictures."""
    pictures: Count
    """Pictures it was trained on, all lessons together."""
    newest: Day
    """The day of its newest pictures."""
    held_out: Count = 0
    """Pictures of it that are kept for evaluation, all lessons together."""
    right: Count = 0
    """Those of them that the model classified correctly after its last lesson."""


@dataclass
class Facts:
    """Everything about a model except its weights."""

    method: Text
    settings: dict[str, Any]
    backbone: Text
    fingerprint: Text
    """Of the backbone's weights and of its preprocessing."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    templates: Annotated[tuple[Text, ...], Field(min_length=1, max_length=1000)]
    lessons: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """How often it was taught; the seed of a lesson follows from it."""
    sizes: list[Annotated[int, Field(ge=1, le=1_000_000)]] = field(default_factory=list)
    """Classes of each task."""
    known: list[KnownClass] = field(default_factory=list)
    calibration: Calibration = field(default_factory=Calibration)
    history: list[LessonRecord] = field(default_factory=list)
    """What each lesson brought, the oldest first."""
    weights: Text = ""
    """Name of the file of weights."""
    sha256: Text = ""
    """Of that file."""

    @property
    def task_of(self) -> list[int]:
        """The task in which each class was learnt, counted from 0."""
        return [task for task, size in enumerate(self.sizes) for _ in range(size)]


class NewerFormatError(UserError):
    """The model was written by a later version of clipcil, in a format that this one cannot read."""


def parse_facts(table: dict[str, Any]) -> Facts:
    """The contents of a `model.toml`, checked.

    Raises:
        NewerFormatError: A later version wrote it.
        UserError: Something is missing or cannot be; the message says what, without the name of the file.
    """
    form = typed(table.get("format"), Text, "format")
    major = form.split(".")[0]
    if not (major.isascii() and major.isdigit()):
        raise UserError(f"'format' is '{form}'; it must be a version")
    if int(major) > int(FORMAT.split(".")[0]):
        raise NewerFormatError(
            f"has format {form}, written by clipcil {table.get('clipcil', '?')}; this is clipcil"
            f" {clipcil.__version__}, which reads up to {FORMAT.split('.')[0]}.x: install a newer one"
        )
    for key in ("classes", "unknown", "sizes", "weights", "sha256"):
        if key not in table:
            raise UserError(f"'{key}' is missing")
    facts: Facts = typed({**table, "known": table["classes"], "calibration": table["unknown"]}, Facts)
    if sum(facts.sizes) != len(facts.known) or not facts.known:
        raise UserError(f"'sizes' count {sum(facts.sizes)} classes, but there are {len(facts.known)}")
    if not WEIGHTS.fullmatch(facts.weights):
        raise UserError(f"'weights' is '{printable(facts.weights)[:60]}', which is not the name of a weights file")
    for known in facts.known:
        _check_share(known.right, known.held_out)
    for lesson in facts.history:
        _check_share(lesson.right, lesson.held_out)
    for template in facts.templates:
        check_template(template)
    return facts


def _check_share(right: int, total: int) -> None:
    if not 0 <= right <= total:
        raise UserError(f"'right' is {right} of {total} pictures")


def to_table(facts: Facts) -> dict[str, Any]:
    """What `model.toml` holds."""
    return {
        "format": FORMAT,
        "clipcil": clipcil.__version__,
        "method": facts.method,
        "backbone": facts.backbone,
        "fingerprint": facts.fingerprint,
        "seed": facts.seed,
        "templates": list(facts.templates),
        "lessons": facts.lessons,
        "sizes": facts.sizes,
        "weights": facts.weights,
        "sha256": facts.sha256,
        "settings": facts.settings,
        "unknown": {key: value for key, value in asdict(facts.calibration).items() if value is not None},
        "history": [asdict(lesson) for lesson in facts.history],
        "classes": [{**asdict(known), "task": task} for known, task in zip(facts.known, facts.task_of, strict=True)],
    }

"""Bodies and answers of the JSON API, as the page, `/docs` and the OpenAPI document show them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, StrictBool, StrictStr, model_validator
from pydantic_core import from_json

from clipcil.classifier.facts import KnownClass
from clipcil.classifier.lesson import Lesson
from clipcil.classifier.predicting import Prediction
from clipcil.classifier.scoring import Confusion

MOST_PAIRS = 20
"""Confused pairs of classes in the result of a lesson, the most frequent first."""


class Error(BaseModel):
    """Why a request was refused or failed, in one line."""

    error: str


class Health(BaseModel):
    """Whether the server runs, and whether a lesson is in progress."""

    status: str
    version: str
    classes: int
    learning: bool


class Guess(BaseModel):
    """A class and its probability."""

    name: str
    probability: float


class PredictionAnswer(BaseModel):
    """The likeliest classes of a picture, or why the picture cannot be read."""

    name: str | None
    unknown: bool
    classes: list[Guess]
    error: str | None

    @classmethod
    def of(cls, found: Prediction) -> PredictionAnswer:
        """The answer for one picture."""
        pairs = zip(found.names, found.probabilities, strict=True)
        guesses = [Guess(name=name, probability=probability) for name, probability in pairs]
        return cls(name=found.name, unknown=found.unknown, classes=guesses, error=found.error)


class Predictions(BaseModel):
    """The predictions of a request, in the order of its pictures."""

    predictions: list[PredictionAnswer]


class WaitingPicture(BaseModel, from_attributes=True):
    """A picture that waits to be taught; `broken` says why it cannot be read."""

    id: str
    title: str
    broken: str | None


class WaitingClass(BaseModel):
    """The waiting pictures of a class."""

    name: str
    pictures: list[WaitingPicture]


class WaitingClasses(BaseModel):
    """All waiting pictures."""

    classes: list[WaitingClass]


class LessonResult(BaseModel):
    """The result of a lesson."""

    new: dict[str, int]
    again: dict[str, int]
    unreadable: list[str]
    repeated: int
    held_out: int
    left_one_out: bool
    accuracy: float | None
    interval: list[float]
    confused: list[Confusion]
    warnings: list[str]

    @classmethod
    def of(cls, lesson: Lesson, broken: list[str], classes: int) -> LessonResult:
        """The result of a lesson.

        Args:
            lesson: The lesson as `learn` returned it.
            broken: A line for each picture that could not be read when it arrived.
            classes: Number of classes the model knows now. One class alone has no accuracy: every answer is right.
        """
        return cls(
            new=lesson.new,
            again=lesson.again,
            unreadable=[*broken, *lesson.unreadable],
            repeated=len(lesson.repeated),
            held_out=lesson.evaluation.pictures,
            left_one_out=lesson.left_one_out,
            accuracy=lesson.accuracy if classes > 1 else None,
            interval=list(lesson.evaluation.interval),
            confused=lesson.evaluation.confused[:MOST_PAIRS],
            warnings=lesson.warnings,
        )


class LessonState(BaseModel):
    """The progress of a lesson; in the end its result or error."""

    id: str
    state: Literal["running", "done", "cancelled", "failed"] = "running"
    stage: str = "starting"
    done: int = 0
    total: int = 0
    seconds_left: float | None = None
    classes: dict[str, int]
    error: str | None = None
    result: LessonResult | None = None


class ClassFacts(BaseModel):
    """A class of the model. Accuracy is measured on held-out pictures."""

    name: str
    learnt: str
    newest: str
    pictures: int
    accuracy: float | None
    held_out: int
    small_pictures: int

    @classmethod
    def of(cls, known: KnownClass, small_pictures: int, alone: bool) -> ClassFacts:
        """The facts of a class; `alone`: the model knows no other class, so accuracy says nothing."""
        accuracy = known.right / known.held_out if known.held_out and not alone else None
        facts = {key: getattr(known, key) for key in ("name", "learnt", "newest", "pictures", "held_out")}
        return cls(**facts, accuracy=accuracy, small_pictures=small_pictures)


class LessonFacts(BaseModel):
    """A lesson of the model, with the accuracy over all classes after it."""

    when: str
    new: int
    again: int
    pictures: int
    classes: int
    held_out: int
    right: int
    accuracy: float | None


class ModelFacts(BaseModel):
    """The model, or the defaults before its first lesson."""

    name: str
    folder: str
    backbone: str
    revision: int
    keep_small_pictures: bool
    limits: dict[str, int]
    exists: bool = False
    method: str | None = None
    classes: list[ClassFacts] = []
    lessons: list[LessonFacts] = []
    accuracy: float | None = None
    held_out: int = 0
    threshold: float | None = None
    previous: dict[str, int] | None = None


class Empty(BaseModel):
    """Nothing more to say."""


class JsonBody(BaseModel):
    """A JSON body, whatever its Content-Type: `curl -d` says that it sends a form."""

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, raw: Any) -> Any:
        return from_json(raw) if isinstance(raw, bytes) else raw


class ClassName(JsonBody):
    """The name of a class."""

    name: StrictStr


class Settings(JsonBody):
    """Settings of the model."""

    keep_small_pictures: StrictBool

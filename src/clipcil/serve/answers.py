"""Limits, bodies and answers of the JSON API, as the page, `/docs` and the OpenAPI document show them."""

import errno
from dataclasses import dataclass
from typing import Literal, Self

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, BeforeValidator, StrictBool, StrictStr
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from clipcil.classifier.predict import Prediction
from clipcil.classifier.scoring import Confusion
from clipcil.errors import UserError, printable

MB = 2**20


@dataclass(frozen=True)
class Limits:
    """What one request, all requests and all waiting pictures may take."""

    picture_bytes: int = 32 * MB
    """Bytes of one picture file."""
    request_bytes: int = 256 * MB
    """Bytes of a request with pictures."""
    request_pictures: int = 64
    """Pictures in one request."""
    model_bytes: int = 1024 * MB
    """Bytes of an uploaded model, packed and unpacked."""
    small_bytes: int = 64 * 2**10
    """Bytes of any other request."""
    all_bytes: int = 1280 * MB
    """Bytes that have arrived of all requests in progress; beyond it the answer is 503."""
    connections: int = 256
    """Open connections. One more closes the one that has waited longest for a request; if all wait for an answer, its
    own is 503."""
    head_seconds: int = 10
    """Seconds in which the head of a request must arrive."""
    body_seconds: int = 600
    """Seconds in which a body must arrive."""
    queued_pictures: int = 256
    """Pictures that wait for a prediction; beyond it the answer is 503."""
    batch: int = 32
    """Pictures predicted in one pass."""
    waiting_pictures: int = 20_000
    """Pictures that wait to be taught."""
    waiting_bytes: int = 4096 * MB
    """Bytes on disk of the pictures that wait to be taught."""

    def body(self, path: str) -> int:
        """Maximum bytes of a request to `path`."""
        if path in ("/api/predict", "/api/waiting"):
            return self.request_bytes
        if path == "/api/explain":
            return self.picture_bytes
        return self.model_bytes if path == "/api/model/upload" else self.small_bytes

    def check(self, picture: bytes) -> None:
        """Refuse a picture file with too many bytes."""
        if len(picture) > self.picture_bytes:
            raise UserError(f"more than {self.picture_bytes / MB:.3g} MB; make it smaller")


class Error(BaseModel):
    """Why a request was refused or failed, in one line."""

    error: str


def explain(error: BaseException) -> tuple[int, str]:
    """The HTTP status of an error, and a line about it for people."""
    if isinstance(error, HTTPException):
        known = error.detail not in ("Not Found", "Method Not Allowed")
        return error.status_code, error.detail if known else "no such address or method; /docs lists all of them"
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return 400, f"{' '.join(map(str, first['loc'][:2]))}: {first['msg']}"
    if isinstance(error, ClientDisconnect):
        return 400, "the request stopped in the middle"  # nobody reads it
    if is_full(error):
        return 507, "the disk of the machine that runs clipcil is full; make room on it and try again"
    if isinstance(error, UserError):
        return 400, printable(" ".join(str(error).split()))
    return 500, f"unexpected error ({type(error).__name__}); the terminal has the details"


def is_full(error: BaseException | None) -> bool:
    """Whether an error was caused by a full disk or an exceeded quota."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None and error.errno in (errno.ENOSPC, errno.EDQUOT)


class Empty(BaseModel):
    """An empty answer."""


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
    def of(cls, found: Prediction, top: int) -> Self:
        """The `top` likeliest classes of a prediction."""
        pairs = list(zip(found.names, found.probabilities, strict=True))[:top]
        classes = [Guess(name=name, probability=probability) for name, probability in pairs]
        return cls(name=found.name, unknown=found.unknown, classes=classes, error=found.error)


class Predictions(BaseModel):
    """The predictions of a request, in the order of its pictures."""

    predictions: list[PredictionAnswer]


class ExplanationAnswer(BaseModel):
    """Why a picture is called what it is called."""

    name: str
    similar: str | None
    """Address of the most similar kept picture of the class; None where no small pictures are kept."""
    heatmap: str
    """The picture under a heat map of what speaks for the class, as a data URL."""


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
    accuracy_if_forced: float | None
    """The accuracy without "none of these"."""
    interval: list[float]
    confused: list[Confusion]
    warnings: list[str]


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
    exists: bool
    method: str
    classes: list[ClassFacts]
    lessons: list[LessonFacts]
    lesson: str | None
    """Id of the lesson that made the model what it is; None after any other change."""
    accuracy: float | None
    held_out: int
    threshold: float | None
    previous: dict[str, int] | None


def accuracy(right: int, pictures: int, classes: int) -> float | None:
    """The share of correct answers. One class alone has no accuracy: every answer is right."""
    return right / pictures if pictures and classes > 1 else None


class ClassName(BaseModel):
    """The name of a class."""

    name: StrictStr


class Settings(BaseModel):
    """Settings of the model."""

    keep_small_pictures: StrictBool


JSON = BeforeValidator(lambda raw: from_json(raw) if isinstance(raw, bytes) else raw)
"""A JSON body, whatever its Content-Type: `curl -d` says that it sends a form."""

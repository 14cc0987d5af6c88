"""The JSON API. An endpoint's docstring is its description in `/docs`; endpoints without `async` run in threads."""

import asyncio
import base64
import errno
import io
import shutil
import threading
import zipfile
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Form, HTTPException, Query, Request, UploadFile
from fastapi.responses import FileResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.datastructures import UploadFile as FormFile

import clipcil
from clipcil.classifier.export import export as export_model
from clipcil.classifier.folder import CARD, MODEL, RESTORE_ADVICE
from clipcil.classifier.state import WEIGHTS
from clipcil.data.dataset import Dataset, open_dataset
from clipcil.data.names import clean_name, same_name
from clipcil.errors import UserError, printable
from clipcil.serve import answers
from clipcil.serve.answers import Limits
from clipcil.serve.model import MOST_CLASSES, Lessons, Predictor, ServedModel
from clipcil.serve.staging import Staging

EVENT_SECONDS = 0.2
"""Seconds between two looks for events to send."""


class Service:
    """The model, the waiting pictures and the lesson that the endpoints work on."""

    def __init__(self, served: ServedModel, staging: Staging, limits: Limits) -> None:
        self.served, self.staging, self.limits = served, staging, limits
        self.lessons, self.predictor = Lessons(served, staging), Predictor(served, limits)
        self.packing = threading.Lock()
        self.explaining = asyncio.Lock()
        self.stopping: Callable[[], bool] = lambda: False
        """Whether the server is asked to stop."""


def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


Used = Annotated[Service, Depends(_service)]


def _scratch(service: Used) -> Iterator[Path]:
    """A private folder, until the answer is sent."""
    with TemporaryDirectory(dir=service.staging.folder) as folder:
        yield Path(folder)


router = APIRouter(prefix="/api")
Scratch = Annotated[Path, Depends(_scratch)]
Name = Annotated[str, Query(min_length=1)]
FILE = {"type": "string", "format": "binary"}


class Jpeg(Response):
    media_type = "image/jpeg"


class Png(Response):
    media_type = "image/png"


class Zip(FileResponse):
    media_type = "application/zip"


def _takes(schemas: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI description of a body that FastAPI does not parse: the schema of each kind."""
    content = {kind: {"schema": schema} for kind, schema in schemas.items()}
    return {"requestBody": {"required": True, "content": content}}


FORM = {"type": "object", "properties": {"pictures": {"type": "array", "items": FILE}}, "required": ["pictures"]}
PICTURES = _takes({"multipart/form-data": FORM, "image/*": FILE})


@router.get("/health")
async def health(service: Used) -> answers.Health:
    """Whether the server runs and a lesson is in progress, with the version and the number of classes."""
    classes = len(service.served.model.classes)
    return answers.Health(status="ok", version=clipcil.__version__, classes=classes, learning=service.lessons.running)


@router.get("/model")
def model(service: Used) -> answers.ModelFacts:
    """The model: its classes, its lessons and what undoing would restore; and the limits of requests."""
    served, small, folder = service.served, service.served.small, service.served.folder.resolve()
    facts, previous = served.model.facts(), served.previous()
    count, (right, held_out) = len(facts.known), facts.right
    return answers.ModelFacts(
        name=printable(folder.name),  # a name that is not UTF-8 cannot be sent as it is
        folder=printable(folder),
        backbone=facts.backbone,
        revision=served.revision,
        keep_small_pictures=served.keep_small,
        limits=asdict(service.limits),
        exists=count > 0,
        method=facts.method,
        classes=[
            answers.ClassFacts(
                **asdict(each),
                accuracy=answers.accuracy(each.right, each.held_out, count),
                small_pictures=len(small.of(each.name)) if small.on else 0,
            )
            for each in facts.known
        ],
        lessons=[
            answers.LessonFacts(**asdict(each), accuracy=answers.accuracy(each.right, each.held_out, each.classes))
            for each in facts.history
        ],
        lesson=served.lesson,
        accuracy=answers.accuracy(right, held_out, count),
        held_out=held_out,
        threshold=facts.calibration.threshold,
        previous={"lessons": previous.lessons, "classes": len(previous.known)} if previous else None,
    )


@router.post("/predict", openapi_extra=PICTURES)
async def predict(
    service: Used, request: Request, top: Annotated[int, Query(ge=1, le=MOST_CLASSES)] = 5
) -> answers.Predictions:
    """Classify pictures: one as the body, or many as form fields `pictures`."""
    if request.headers.get("content-type", "").startswith("multipart/"):
        async with request.form(max_files=service.limits.request_pictures) as form:
            pictures = [await part.read() for part in form.getlist("pictures") if isinstance(part, FormFile)]
    else:
        pictures = [body] if (body := await request.body()) else []
    if not pictures:
        raise HTTPException(400, "send at least one picture in a field 'pictures'")
    found = await service.predictor.predict(pictures)
    return answers.Predictions(predictions=[answers.PredictionAnswer.of(each, top) for each in found])


@router.post("/explain", openapi_extra=_takes({"image/*": FILE}))
async def explain(service: Used, request: Request) -> answers.ExplanationAnswer:
    """Why a picture (the body) is called what it is called: a heat map, and the most similar kept picture."""
    picture, served = await request.body(), service.served
    async with service.explaining:
        found = await asyncio.to_thread(served.need().explain, picture)
    kept = served.small.of(found.name)
    similar = None
    if found.similar in kept:
        place = urlencode({"name": found.name, "index": kept.index(found.similar), "revision": served.revision})
        similar = f"/api/classes/picture?{place}"
    heatmap = f"data:image/png;base64,{base64.b64encode(found.png).decode()}"
    return answers.ExplanationAnswer(name=found.name, similar=similar, heatmap=heatmap)


@router.get("/examples/picture", response_class=Png)
def example_picture(name: Name, index: Annotated[int, Query(ge=0)] = 0) -> Response:
    """Picture number `index` (PNG) of a class of the embedded dataset emoji: 0 to 5 to teach, 6 and 7 to try."""
    data = _examples()
    if name in data.classes:
        parts = [(part, part.labels == data.classes.index(name)) for part in (data.train, data.test)]
        rows = [part.pictures[row] for part, own in parts for row in part.rows[own].tolist()]
        if index < len(rows):
            return Png(rows[index])
    raise HTTPException(404, "there is no such example picture")


@cache
def _examples() -> Dataset:
    return open_dataset("emoji")


@router.get("/waiting", response_model=answers.WaitingClasses)
def waiting(service: Used) -> Any:
    """The pictures that wait to be taught, class by class."""
    return {"classes": [{"name": name, "pictures": each} for name, each in service.staging.classes().items()]}


@router.post("/waiting", status_code=201, response_model=answers.WaitingClass)
def add_waiting(service: Used, name: Annotated[str, Form()], pictures: list[UploadFile]) -> Any:
    """Add pictures (form fields `pictures`) to those that wait to be taught as the class `name`.

    If one is refused, those before it still wait.
    """
    most = service.limits.request_pictures
    if len(pictures) > most:
        raise HTTPException(400, f"too many files; send at most {most} pictures in one request")
    items = [service.staging.add(name, each.filename or "", each.file.read()) for each in pictures]
    return {"name": clean_name(name), "pictures": items}


@router.delete("/waiting")
def remove_waiting(service: Used, id: str | None = None, name: str | None = None) -> answers.Empty:
    """Remove the waiting picture `id`, or all waiting pictures of the class `name`."""
    if (id is None) == (name is None):
        raise HTTPException(400, "give ?id= for one picture or ?name= for a whole class")
    if not service.staging.remove(id, name) and id is not None:
        raise HTTPException(404, "no such picture is waiting")
    return answers.Empty()


@router.get("/waiting/thumbnail", response_class=Jpeg)
def thumbnail(service: Used, id: str) -> Response:
    """A small copy (JPEG) of a picture that waits."""
    item = service.staging.find(id)
    if item is not None:
        with suppress(FileNotFoundError):  # broken, or removed at this moment
            return Jpeg(item.thumbnail.read_bytes())
    raise HTTPException(404, "no such picture is waiting")


@router.get("/lesson")
async def lesson(service: Used) -> answers.LessonState | None:
    """The current lesson with its progress, or the result of the last one."""
    return service.lessons.state


@router.post("/lesson", status_code=202)
async def start_lesson(service: Used) -> answers.LessonState:
    """Teach all waiting pictures as one lesson; until it ends, predictions come from the model before it."""
    return service.lessons.start()


@router.delete("/lesson", status_code=202)
async def cancel_lesson(service: Used) -> answers.LessonState:
    """Stop the current lesson; the model stays as it was and the pictures wait again."""
    return service.lessons.cancel()


@router.get("/events", response_class=EventSourceResponse)
async def events(service: Used) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events: `lesson` with its progress; `model` and `waiting` when they have changed."""
    seen: dict[str, str] = {}
    while not service.stopping():
        state = service.lessons.state  # a page that reconnects after a crash gets null: its lesson was lost
        lesson = state.model_dump_json() if state else "null"
        now = {"lesson": lesson, "model": str(service.served.revision), "waiting": str(service.staging.revision)}
        for kind, text in now.items():
            if seen.get(kind) != text:
                yield ServerSentEvent(event=kind, raw_data=text)
        seen = now
        await asyncio.sleep(EVENT_SECONDS)


@router.patch("/classes")
def rename_class(service: Used, name: Name, body: Annotated[answers.ClassName, answers.JSON]) -> answers.ClassName:
    """Rename the class `name`; predictions change only in the name."""
    with service.served.change() as model:
        model.rename(name, body.name)
    return answers.ClassName(name=clean_name(body.name))


@router.delete("/classes")
def forget_class(service: Used, name: Name) -> answers.Empty:
    """Forget the class `name`. The folder keeps it, for an undo, until the next change; then nothing of it is left."""
    with service.served.change() as model:
        model.forget(name)
    return answers.Empty()


@router.get("/classes/picture", response_class=Jpeg)
def small_picture(service: Used, name: Name, index: Annotated[int, Query(ge=0)] = 0) -> Response:
    """Small picture number `index` (JPEG) of those kept of the class `name`."""
    known = {same_name(each) for each in service.served.need().classes}
    pictures = service.served.small.of(name) if same_name(name) in known else []
    if index >= len(pictures):
        raise HTTPException(404, "there is no such picture")
    return Jpeg(pictures[index])


@router.post("/undo")
def undo(service: Used) -> answers.Empty:
    """Restore the model before the last lesson or change; undoing again restores what was undone."""
    service.served.undo()
    return answers.Empty()


@router.patch("/settings")
def settings(service: Used, body: Annotated[answers.Settings, answers.JSON]) -> answers.Settings:
    """Switch the keeping of small pictures on or off, also before the first lesson; switching it off deletes them."""
    served = service.served
    if served.model.classes:  # before the first lesson there is no folder
        served.small.switch(body.keep_small_pictures)
    served.keep_small = body.keep_small_pictures
    served.revision += 1
    return body


@router.get("/export", response_class=Zip)
def export(service: Used, scratch: Scratch, format: Literal["pt2", "onnx"] = "pt2") -> Response:
    """Download the model exported to run without clipcil (`format`: pt2 or onnx), as a zip file."""
    service.served.need()
    with service.packing:  # a copy is traced, because tracing disturbs other uses of a model
        export_model(service.served.copy(), scratch / "files", format)
    return _zip(service, scratch, format)


@router.get("/model/download", response_class=Zip)
def download(service: Used, scratch: Scratch) -> Response:
    """Download the model as a zip file, to be uploaded elsewhere or unpacked for `clipcil predict`."""
    service.served.need().save(scratch / "files")
    return _zip(service, scratch, "model")


def _zip(service: Service, scratch: Path, what: str) -> Response:
    """The files in the folder `files` of `scratch`, packed."""
    name = f"{printable(service.served.folder.resolve().name)}-{what}.zip"
    # Without strict timestamps, because a machine without a clock gives files times before 1980, which zip lacks.
    with zipfile.ZipFile(scratch / "file.zip", "w", zipfile.ZIP_STORED, strict_timestamps=False) as packed:
        for path in sorted((scratch / "files").glob("[!.]*")):
            packed.write(path, path.name)
    return Zip(scratch / "file.zip", filename=name)


async def _archive(request: Request, scratch: Scratch) -> Path:
    """The body of a request as a file."""
    with (scratch / "model.zip").open("wb") as file:
        async for chunk in request.stream():
            file.write(chunk)
    return scratch / "model.zip"


@router.post("/model/upload", openapi_extra=_takes({"application/zip": FILE}))
def upload(service: Used, scratch: Scratch, archive: Annotated[Path, Depends(_archive)]) -> answers.Empty:
    """Replace the model by an uploaded one (the body: a zip file as `download` gives it)."""
    folder = scratch / "model"
    try:
        unpack_model(archive, folder, service.limits.model_bytes)
        with service.served.change(start=folder):
            pass
    except UserError as error:  # without the path of the folder, which is private
        line = str(error).removesuffix(f"; {RESTORE_ADVICE}").replace(f"{folder}/", "").replace(str(folder), "it")
        raise UserError(f"the uploaded model: {line}") from error
    return answers.Empty()


def unpack_model(archive: Path, folder: Path, most: int) -> None:
    """Unpack an uploaded model into the new folder `folder`: only files of a model, at most `most` bytes."""
    folder.mkdir(mode=0o700)
    try:
        with _InPieces(archive) as file, zipfile.ZipFile(file) as packed:
            entries = packed.infolist()
            names = {entry.filename for entry in entries}
            ours = all(name in (MODEL, CARD) or WEIGHTS.fullmatch(name) for name in names)
            if not ours or MODEL not in names or not len(names) == len(entries) <= 3:
                raise UserError(f"the zip file must hold {MODEL}, {CARD} and one file of weights, and nothing else")
            if sum(entry.file_size for entry in entries) > most:
                raise UserError("the zip file unpacks to more bytes than a model may have")
            for entry in entries:
                if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise zipfile.BadZipFile("other kinds are unpacked in one piece: 500 bytes made 400 MB")
                with packed.open(entry) as source, (folder / entry.filename).open("wb") as target:
                    shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, IndexError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a place before the start of the file
            raise
        raise UserError(f"not a zip file of a model ({type(error).__name__}); upload one downloaded here") from error


class _InPieces(io.FileIO):
    """A file that gives at most a megabyte at once: `zipfile` reads a directory in one piece, and one of a gigabyte
    takes several times that in memory."""

    def read(self, size: int | None = -1) -> bytes:
        wanted = 2**20 + 1 if size is None or size < 0 else min(size, 2**20 + 1)
        data = super().read(wanted) or b""
        if len(data) > 2**20:
            raise zipfile.BadZipFile("the directory is too large")
        return data

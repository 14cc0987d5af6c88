"""The JSON API. The docstring of each endpoint is its description in `/docs`.

Endpoints that are not `async` run in threads.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated, Any, Literal

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from python_multipart.multipart import parse_options_header
from starlette.background import BackgroundTask
from starlette.datastructures import UploadFile

import clipcil
from clipcil.classifier.facts import KnownClass
from clipcil.classifier.model_folder import COPY
from clipcil.classifier.small_pictures import SmallPictures
from clipcil.data.names import same_name
from clipcil.errors import UserError, printable
from clipcil.serve import answers
from clipcil.serve.guard import Limits
from clipcil.serve.lessons import Hub, Lessons
from clipcil.serve.model import Keeper, Predictor
from clipcil.serve.staging import Staging, Waiting, class_name
from clipcil.serve.transfer import download_name, pack_export, pack_model, unpack_model


class Service:
    """The model, the waiting pictures and the lesson that the endpoints work on."""

    def __init__(self, keeper: Keeper, staging: Staging, limits: Limits) -> None:
        self.keeper, self.staging, self.limits = keeper, staging, limits
        self.hub = Hub()
        self.small = SmallPictures(keeper.folder)
        self.lessons = Lessons(keeper, staging, self.small, self.hub)
        self.predictor = Predictor(keeper, limits)
        self.decoders = CapacityLimiter(2)
        self.packing = threading.Lock()

    @contextmanager
    def change(self) -> Iterator[None]:
        """A change of the model: small and waiting pictures follow it, and every page hears of it."""
        before = self._classes()
        yield
        try:
            if self.keeper.model is not None:
                self.small.follow(before)
        finally:  # the model has changed even if its small pictures cannot follow
            self._rename_waiting(before)
            self.hub.publish(model={}, waiting={})

    def _classes(self) -> list[KnownClass]:
        return self.keeper.model.class_facts if self.keeper.model is not None else []

    def _rename_waiting(self, before: list[KnownClass]) -> None:
        """Where the change only renamed classes, or undid that, waiting pictures get the new names."""
        after = self._classes()
        if [replace(each, name="") for each in before] == [replace(each, name="") for each in after]:
            for old, new in zip(before, after, strict=True):
                if old.name != new.name:
                    self.staging.rename_class(old.name, new.name)

    def pack(self, what: str, pack: Callable[[Path], Path]) -> Response:
        """A zip file that `pack` writes, as a download; one is made at a time, and deleted when it was sent.

        Raises:
            HTTPException: 409 before the first lesson, 503 while another one is made.
        """
        self.keeper.need()
        if self.packing.locked():
            raise HTTPException(503, "another download is being made; try again in a moment", {"Retry-After": "5"})
        with self.packing:
            scratch = self.scratch()
            try:
                file = pack(scratch / "file.zip")
            except BaseException:
                shutil.rmtree(scratch, ignore_errors=True)
                raise
        done = BackgroundTask(shutil.rmtree, scratch, ignore_errors=True)
        return FileResponse(
            file, media_type=KINDS["zip"], filename=download_name(self.keeper.folder, what), background=done
        )

    def scratch(self) -> Path:
        """A new private folder, in the staging folder."""
        return Path(mkdtemp(dir=self.staging.folder))


def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


router = APIRouter(prefix="/api")
KINDS = {"form": "multipart/form-data", "image": "image/*", "zip": "application/zip"}
FILE = {"type": "string", "format": "binary"}
FILES = {"type": "array", "items": FILE}
Used = Annotated[Service, Depends(_service)]
Name = Annotated[str, Query(min_length=1)]


def _takes(**schemas: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI description of a body that is not JSON: the schema of each kind in `KINDS`."""
    content = {KINDS[kind]: {"schema": schema} for kind, schema in schemas.items()}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


def _gives(kind: str) -> dict[str, Any]:
    """The OpenAPI description of an answer that is not JSON."""
    return {"response_class": Response, "responses": {200: {"content": {kind: {"schema": FILE}}}}}


@router.get("/health")
async def health(service: Used) -> answers.Health:
    """Whether the server runs and a lesson is in progress, with the version and the number of classes."""
    model = service.keeper.model
    classes, learning = len(model.classes) if model else 0, service.lessons.running
    return answers.Health(status="ok", version=clipcil.__version__, classes=classes, learning=learning)


@router.get("/model")
def model(service: Used) -> answers.ModelFacts:
    """The model: its classes, its lessons and what undoing would restore; and the limits of requests."""
    keeper, small = service.keeper, service.small
    folder = keeper.folder.resolve()
    found = answers.ModelFacts(
        name=printable(folder.name),  # a name that is not UTF-8 cannot be sent as it is
        folder=printable(folder),
        backbone=keeper.backbone,
        revision=keeper.revision,
        keep_small_pictures=small.on,
        limits={key: getattr(service.limits, key) for key in ("picture_bytes", "request_bytes", "request_pictures")},
    )
    if keeper.model is None:
        return found
    facts, previous = keeper.model.facts(), keeper.previous()
    alone = len(facts.known) == 1  # one class is always right, which says nothing
    right, found.held_out = sum(known.right for known in facts.known), sum(known.held_out for known in facts.known)
    found.exists, found.method, found.threshold = True, facts.method, facts.calibration.threshold
    found.accuracy = right / found.held_out if found.held_out and not alone else None
    for known in facts.known:
        found.classes.append(answers.ClassFacts.of(known, len(small.of(known.name)) if small.on else 0, alone))
    for record in facts.history:
        accuracy = record.accuracy if record.classes > 1 else None
        found.lessons.append(answers.LessonFacts(**asdict(record), accuracy=accuracy))
    if previous is not None:
        found.previous = {"lessons": previous.lessons, "classes": len(previous.known)}
    return found


@router.post("/predict", **_takes(form={"type": "object", "properties": {"pictures": FILES}}, image=FILE))
async def predict(
    service: Used, request: Request, top: Annotated[int, Query(ge=1, le=Limits.top)] = 5
) -> answers.Predictions:
    """Classify pictures: one as the body, or many as form fields `pictures`."""
    if request.headers.get("content-type", "").startswith("multipart/"):
        pictures = [content for _, content in (await _read_form(service, request))[1]]
    else:
        pictures = [await request.body()]
    found = await service.predictor.predict(pictures, top)
    return answers.Predictions(predictions=[answers.PredictionAnswer.of(each) for each in found])


@router.get("/waiting")
async def waiting(service: Used) -> answers.WaitingClasses:
    """The pictures that wait to be taught, class by class."""
    classes = [{"name": name, "pictures": items} for name, items in service.staging.classes().items()]
    return answers.WaitingClasses.model_validate({"classes": classes})


WAITING = {"type": "object", "properties": {"name": {"type": "string"}, "pictures": FILES}}


@router.post("/waiting", status_code=201, **_takes(form=WAITING | {"required": ["name", "pictures"]}))
async def add_waiting(service: Used, request: Request) -> answers.WaitingClass:
    """Add pictures (form fields `pictures`) to those that wait to be taught as the class `name`."""
    raw, pictures = await _read_form(service, request)
    name, items = class_name(raw), list[Waiting]()

    def add() -> None:
        for title, content in pictures:
            items.append(service.staging.add(name, title, content))

    try:
        await anyio.to_thread.run_sync(add, limiter=service.decoders)
    finally:  # if one picture is refused, those before it still wait
        service.hub.publish(waiting={})
    return answers.WaitingClass.model_validate({"name": name, "pictures": items})


@router.delete("/waiting")
def remove_waiting(service: Used, id: str | None = None, name: str | None = None) -> answers.Empty:
    """Remove the waiting picture `id`, or all waiting pictures of the class `name`."""
    if (id is None) == (name is None):
        raise HTTPException(400, "give ?id= for one picture or ?name= for a whole class")
    if id is not None and service.staging.find(id) is None:
        raise HTTPException(404, "no such picture is waiting")
    service.staging.remove(id, name)
    service.hub.publish(waiting={})
    return answers.Empty()


@router.get("/waiting/thumbnail", **_gives("image/jpeg"))
def thumbnail(service: Used, id: str) -> Response:
    """A small copy (JPEG) of a picture that waits."""
    item = service.staging.find(id)
    try:
        if item is not None and item.broken is None:
            return Response(service.staging.thumbnail(item.id).read_bytes(), media_type="image/jpeg")
    except FileNotFoundError:  # removed at this moment
        pass
    raise HTTPException(404, "no such picture is waiting")


@router.get("/lesson")
async def lesson(service: Used) -> answers.LessonState | None:
    """The current lesson with its progress, or the result of the last one."""
    return service.lessons.state


@router.post("/lesson", status_code=202)
async def start_lesson(service: Used) -> answers.LessonState:
    """Teach all waiting pictures as one lesson; until it ends, predictions come from the model before it."""
    state = service.lessons.start()
    service.hub.publish(waiting={})
    return state


@router.delete("/lesson", status_code=202)
async def cancel_lesson(service: Used) -> answers.LessonState:
    """Stop the current lesson; the model stays as it was and the pictures wait again."""
    return service.lessons.cancel()


@router.get("/events", **_gives("text/event-stream"))
async def events(service: Used) -> Response:
    """Server-sent events: `lesson` with its progress, `model` and `waiting` when they have changed."""
    if service.hub.listeners >= service.limits.listeners:
        raise HTTPException(503, "too many pages listen already; close one", {"Retry-After": "5"})
    return StreamingResponse(service.hub.listen(), media_type="text/event-stream")


@router.patch("/classes")
def rename_class(service: Used, name: Name, body: answers.ClassName) -> answers.ClassName:
    """Rename the class `name`; predictions change only in the name."""
    new = class_name(body.name)
    with service.change(), service.keeper.changing() as model:
        model.rename(name, new)
    return answers.ClassName(name=new)


@router.delete("/classes")
def forget_class(service: Used, name: Name) -> answers.Empty:
    """Forget the class `name`, with everything that is kept of it; this cannot be undone."""
    # The previous model would still contain the class.
    with service.change(), service.keeper.changing(keep_previous=False) as model:
        model.forget(name)
    return answers.Empty()


@router.get("/classes/picture", **_gives("image/jpeg"))
def small_picture(service: Used, name: Name, index: Annotated[int, Query(ge=0)] = 0) -> Response:
    """Small picture number `index` (JPEG) of those kept of the class `name`."""
    known = {same_name(each) for each in service.keeper.need().classes}
    pictures = service.small.of(name) if same_name(name) in known else []
    if index >= len(pictures):
        raise HTTPException(404, "there is no such picture")
    return Response(pictures[index], media_type="image/jpeg")


@router.post("/undo")
def undo(service: Used) -> answers.Empty:
    """Restore the model before the last lesson or change; undoing again restores what was undone."""
    with service.change():
        service.keeper.undo()
    return answers.Empty()


@router.patch("/settings")
def settings(service: Used, body: answers.Settings) -> answers.Settings:
    """Switch the keeping of small pictures on or off; switching it off deletes them."""
    service.keeper.need()
    service.small.switch(body.keep_small_pictures)
    service.hub.publish(model={})
    return answers.Settings(keep_small_pictures=service.small.on)


@router.get("/export", **_gives(KINDS["zip"]))
def export(service: Used, format: Literal["pt2", "onnx"] = "pt2") -> Response:
    """Download the model exported to run without clipcil (`format`: pt2 or onnx), as a zip file."""
    return service.pack(format, lambda into: pack_export(service.keeper.copy(), format, into))


@router.get("/model/download", **_gives(KINDS["zip"]))
def download(service: Used) -> Response:
    """Download the model as a zip file, to be uploaded elsewhere or unpacked for `clipcil predict`."""
    return service.pack("model", lambda into: pack_model(service.keeper.folder, into))


@router.post("/model/upload", **_takes(zip=FILE))
async def upload(service: Used, request: Request) -> answers.Empty:
    """Replace the model by an uploaded one (the body: a zip file as `download` gives it)."""
    scratch = service.scratch()
    archive, unpacked = scratch / "model.zip", scratch / "model"

    def take_over() -> None:
        try:
            unpack_model(archive, unpacked, service.limits.model_bytes)
            with service.change(), service.keeper.changing(unpacked):
                pass
        except UserError as error:  # without the path of the folder, which is private
            line = str(error).removesuffix(f"; {COPY}").replace(f"{unpacked}/", "").replace(str(unpacked), "it")
            raise UserError(f"the uploaded model: {line}") from error

    try:
        with archive.open("wb") as file:
            async for chunk in request.stream():
                file.write(chunk)
        await anyio.to_thread.run_sync(take_over)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return answers.Empty()


async def _read_form(service: Service, request: Request) -> tuple[str, list[tuple[str, bytes]]]:
    """The text `name` of a form, and title and bytes of its pictures; of one too large, one byte more than allowed."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data":
        raise HTTPException(415, "send a form (multipart/form-data) with fields 'pictures'")
    if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):  # some encode text that no answer can hold
        raise HTTPException(415, "send the texts of the form as UTF-8")
    limits = service.limits
    async with request.form(max_files=limits.request_pictures, max_fields=4, max_part_size=4096) as form:
        files = [part for part in form.getlist("pictures") if isinstance(part, UploadFile)]
        if not files:
            raise HTTPException(400, "send at least one picture in a field 'pictures'")
        name, size = form.get("name", ""), limits.picture_bytes + 1
        return str(name), [(file.filename or "", await file.read(size)) for file in files]

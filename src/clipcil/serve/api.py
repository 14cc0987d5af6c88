"""The JSON API. The docstring of each endpoint is its description in `/docs`."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter
from python_multipart.multipart import parse_options_header
from starlette.background import BackgroundTask
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

import clipcil
from clipcil.classifier.facts import KnownClass
from clipcil.classifier.model_folder import COPY
from clipcil.classifier.predicting import Prediction
from clipcil.classifier.small_pictures import SmallPictures
from clipcil.data.names import same_name
from clipcil.errors import UserError
from clipcil.serve.events import Hub
from clipcil.serve.facts import model_json
from clipcil.serve.keeper import Keeper
from clipcil.serve.lessons import Lessons
from clipcil.serve.limits import Limits
from clipcil.serve.predictor import Predictor
from clipcil.serve.staging import Staging, class_name
from clipcil.serve.transfer import download_name, pack_export, pack_model, unpack_model


class Api:
    """The endpoints, and what they work on."""

    def __init__(self, keeper: Keeper, staging: Staging, limits: Limits) -> None:
        self.keeper, self.staging, self.limits = keeper, staging, limits
        self.hub = Hub(limits.listeners)
        self.small = SmallPictures(keeper.folder)
        self.lessons = Lessons(keeper, staging, self.small, self.hub)
        self.predictor = Predictor(lambda: keeper.model, limits)
        self._decoders = CapacityLimiter(2)
        self._packing = asyncio.Lock()

    async def health(self, request: Request) -> Response:
        """Whether the server runs and a lesson is in progress, with the version and the number of classes."""
        model = self.keeper.model
        classes = len(model.classes) if model else 0
        return JSONResponse(
            {"status": "ok", "version": clipcil.__version__, "classes": classes, "learning": self.lessons.running}
        )

    async def model(self, request: Request) -> Response:
        """The model: its classes, its lessons and what undoing would restore; and the limits of requests."""
        return JSONResponse(model_json(self.keeper, self.small, self.limits))

    async def predict(self, request: Request) -> Response:
        """Classify pictures: one as the body, or many as form fields `pictures`."""
        top = _number(request, "top", 5, self.limits.top)
        if request.headers.get("content-type", "").startswith("multipart/"):
            pictures = [content for _, content in await self._pictures(await self._form(request))]
        else:
            pictures = [await request.body()]
        whole = [picture for picture in pictures if len(picture) <= self.limits.picture_bytes]
        found = iter(await self.predictor.predict(whole, top)) if whole else iter(())
        too_large = Prediction([], [], error=self._too_large())
        answers = [next(found) if len(picture) <= self.limits.picture_bytes else too_large for picture in pictures]
        return JSONResponse({"predictions": [_prediction_json(answer) for answer in answers]})

    async def waiting(self, request: Request) -> Response:
        """The pictures that wait to be taught, class by class."""
        classes = self.staging.classes()
        rows = [{"name": name, "pictures": [item.as_json() for item in items]} for name, items in classes.items()]
        return JSONResponse({"classes": rows})

    async def add_waiting(self, request: Request) -> Response:
        """Add pictures (form fields `pictures`) to those that wait to be taught as the class `name`."""
        form = await self._form(request)
        name = class_name(_text(form.get("name")))
        items = []
        try:
            for title, content in await self._pictures(form):
                if len(content) > self.limits.picture_bytes:
                    items.append({"id": None, "title": title, "broken": self._too_large()})
                    continue
                add = lambda title=title, content=content: self.staging.add(name, title, content)  # noqa: E731
                items.append((await anyio.to_thread.run_sync(add, limiter=self._decoders)).as_json())
        finally:  # where one of them is refused, those before it wait all the same
            self.hub.publish("waiting", {})
        return JSONResponse({"name": name, "pictures": items}, 201)

    async def remove_waiting(self, request: Request) -> Response:
        """Remove the waiting picture `id`, or all waiting pictures of the class `name`."""
        id, name = request.query_params.get("id"), request.query_params.get("name")
        if (id is None) == (name is None):
            raise HTTPException(400, "say which: ?id= for one picture or ?name= for a whole class")
        if id is not None and self.staging.find(id) is None:
            raise HTTPException(404, "no such picture is waiting")
        if id is not None:
            self.staging.remove(id)
        else:
            self.staging.remove_class(name or "")
        self.hub.publish("waiting", {})
        return JSONResponse({})

    async def thumbnail(self, request: Request) -> Response:
        """A small copy (JPEG) of a picture that waits."""
        item = self.staging.find(request.query_params.get("id", ""))
        if item is None or item.broken is not None:
            raise HTTPException(404, "no such picture is waiting")
        try:
            return Response(self.staging.thumbnail(item.id).read_bytes(), media_type="image/jpeg")
        except FileNotFoundError:  # taken out in this moment
            raise HTTPException(404, "no such picture is waiting") from None

    async def lesson(self, request: Request) -> Response:
        """The current lesson with its progress, or the result of the last one."""
        return JSONResponse(self.lessons.state)

    async def start_lesson(self, request: Request) -> Response:
        """Teach all waiting pictures as one lesson; until it ends, predictions come from the model before it."""
        state = self.lessons.start()
        self.hub.publish("waiting", {})
        return JSONResponse(state, 202)

    async def cancel_lesson(self, request: Request) -> Response:
        """Stop the current lesson; the model stays as it was and the pictures wait again."""
        return JSONResponse(self.lessons.cancel(), 202)

    async def events(self, request: Request) -> Response:
        """Server-sent events: `lesson` with its progress, `model` and `waiting` when they have changed."""
        if self.hub.full:
            raise HTTPException(503, "too many pages listen already; close one", {"Retry-After": "5"})
        if request.method == "HEAD":  # nothing of a stream would be sent, and it would be held until the client leaves
            return Response(media_type="text/event-stream")
        # None before the first lesson: a page that has seen the server die in the middle of one learns that it is gone.
        return StreamingResponse(self.hub.listen({"lesson": self.lessons.state}), media_type="text/event-stream")

    async def rename_class(self, request: Request) -> Response:
        """Rename the class `name`; predictions change only in the name."""
        name, body = _class(request), await _json(request)
        new = class_name(_text(body.get("name")))

        def rename() -> None:
            with self.keeper.changing() as model:
                model.rename(name, new)

        await self._change(rename)
        return JSONResponse({"name": new})

    async def forget_class(self, request: Request) -> Response:
        """Forget the class `name`, with everything that is kept of it; this cannot be undone."""
        name = _class(request)

        def forget() -> None:
            with self.keeper.changing(keep_previous=False) as model:  # the previous model would still contain the class
                model.forget(name)

        await self._change(forget)
        return JSONResponse({})

    async def undo(self, request: Request) -> Response:
        """Restore the model before the last lesson or change; undoing again restores what was undone."""
        await self._change(self.keeper.undo)
        return JSONResponse({})

    async def small_picture(self, request: Request) -> Response:
        """Small picture number `index` (JPEG) of those kept of the class `name`."""
        name, index = _class(request), _number(request, "index", 0, 10**6, least=0)
        known = {same_name(each) for each in self.keeper.need().classes}
        pictures = self.small.of(name) if same_name(name) in known else []
        if index >= len(pictures):
            raise HTTPException(404, "there is no such picture")
        return Response(pictures[index], media_type="image/jpeg")

    async def settings(self, request: Request) -> Response:
        """Switch the keeping of small pictures on or off; switching it off deletes them."""
        on = (await _json(request)).get("keep_small_pictures")
        if not isinstance(on, bool):
            raise HTTPException(400, 'say {"keep_small_pictures": true} or false')
        self.keeper.need()
        self.small.switch(on)
        self.hub.publish("model", {})
        return JSONResponse({"keep_small_pictures": self.small.on})

    async def export(self, request: Request) -> Response:
        """Download the model exported to run without clipcil (`format`: pt2 or onnx), as a zip file."""
        form = request.query_params.get("format", "pt2")
        if form not in ("pt2", "onnx"):
            raise HTTPException(400, "format is pt2 or onnx")
        return await self._packed(
            form, lambda into: pack_export(self.keeper, "onnx" if form == "onnx" else "pt2", into)
        )

    async def download(self, request: Request) -> Response:
        """Download the model as a zip file, to be uploaded elsewhere or unpacked for `clipcil predict`."""
        return await self._packed("model", lambda into: pack_model(self.keeper.folder, into))

    async def upload(self, request: Request) -> Response:
        """Replace the model by an uploaded one (the body: a zip file as `download` gives it)."""
        scratch = self._scratch()
        try:
            with (scratch / "model.zip").open("wb") as file:
                async for chunk in request.stream():
                    file.write(chunk)

            def take_over() -> None:
                unpacked = scratch / "model"
                try:
                    unpack_model(scratch / "model.zip", unpacked, self.limits.model_bytes)
                    with self.keeper.changing(unpacked):
                        pass
                except UserError as error:  # the person knows nothing of that folder
                    said = str(error).removesuffix(f"; {COPY}").replace(f"{unpacked}/", "")
                    raise UserError(f"the uploaded model: {said.replace(str(unpacked), 'it')}") from error

            await self._change(take_over)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return JSONResponse({})

    async def _packed(self, what: str, pack: Any) -> Response:
        self.keeper.need()
        if self._packing.locked():
            raise HTTPException(
                503, "another download is being made ready; try again in a moment", {"Retry-After": "5"}
            )
        async with self._packing:
            scratch = self._scratch()
            try:
                file = await asyncio.to_thread(pack, scratch / "file.zip")
            except BaseException:
                shutil.rmtree(scratch, ignore_errors=True)
                raise
        name, done = download_name(self.keeper.folder, what), BackgroundTask(shutil.rmtree, scratch, ignore_errors=True)
        return FileResponse(file, filename=name, media_type="application/zip", background=done)

    def _rename_waiting(self, before: list[KnownClass]) -> None:
        """Pictures that wait for a class follow where it was renamed, or where that was undone."""
        after = self.keeper.model.class_facts if self.keeper.model is not None else []
        if [replace(each, name="") for each in before] != [replace(each, name="") for each in after]:
            return  # classes were learnt, forgotten or replaced
        for old, new in zip(before, after, strict=True):
            if old.name != new.name:
                self.staging.rename_class(old.name, new.name)

    async def _change(self, do: Any) -> None:
        """Change the model in a thread, then tell every page."""
        before = self.keeper.model.class_facts if self.keeper.model is not None else []
        await asyncio.to_thread(do)
        try:
            if self.keeper.model is not None:
                self.small.follow(before)
        finally:  # the model is another now, whatever becomes of its small pictures
            self._rename_waiting(before)
            self.hub.publish("model", {})
            self.hub.publish("waiting", {})

    async def _form(self, request: Request) -> Any:
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise HTTPException(415, "send a form (multipart/form-data) with fields 'pictures'")
        charset = parse_options_header(request.headers["content-type"])[1].get(b"charset", b"utf-8")
        if charset.lower() not in (b"utf-8", b"utf8"):  # some make text of it that no answer could be written with
            raise HTTPException(415, "send the texts of the form as UTF-8")
        return await request.form(max_files=self.limits.request_pictures, max_fields=4, max_part_size=4096)

    async def _pictures(self, form: Any) -> list[tuple[str, bytes]]:
        """Title and bytes of every picture of a form; of one that is too large, just enough to notice."""
        try:
            files = [part for part in form.getlist("pictures") if isinstance(part, UploadFile)]
            if not files:
                raise HTTPException(400, "send at least one picture in a field 'pictures'")
            return [(file.filename or "", await file.read(self.limits.picture_bytes + 1)) for file in files]
        finally:
            await form.close()

    def _too_large(self) -> str:
        return f"more than {self.limits.picture_bytes // 2**20} MB; make it smaller"

    def _scratch(self) -> Path:
        path = self.staging.folder / secrets.token_hex(8)
        path.mkdir(mode=0o700)
        return path


def _prediction_json(prediction: Prediction) -> dict[str, Any]:
    pairs = zip(prediction.names, prediction.probabilities, strict=True)
    return {
        "name": prediction.name,
        "unknown": prediction.unknown,
        "classes": [{"name": name, "probability": probability} for name, probability in pairs],
        "error": prediction.error,
    }


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise HTTPException(400, "say the name of the class as text in 'name'")
    return name


def _class(request: Request) -> str:
    name = request.query_params.get("name")
    if not name:
        raise HTTPException(400, "say which class: ?name=")
    return name


def _number(request: Request, key: str, default: int, most: int, least: int = 1) -> int:
    text = request.query_params.get(key, str(default))
    if not text.isdecimal() or len(text) > 9 or not least <= int(text) <= most:
        raise HTTPException(400, f"{key} is a whole number from {least} to {most}")
    return int(text)


async def _json(request: Request) -> dict[str, Any]:
    try:
        value = json.loads(await request.body())
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise HTTPException(400, "the body is not a JSON object")
    return value

"""Single requests to the application, without a server: full disks, pictures that vanish, lessons that fail late."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clipcil.classifier.facts import Facts, KnownClass
from clipcil.classifier.lesson import Lesson, LessonRecord
from clipcil.classifier.model_folder import write_model
from clipcil.classifier.scoring import Evaluation
from clipcil.errors import UserError
from clipcil.serve import transfer
from clipcil.serve.answers import LessonState
from clipcil.serve.api import Service
from clipcil.serve.guard import Guard, Limits
from clipcil.serve.lessons import Hub, Lessons
from clipcil.serve.server import build_app
from clipcil.serve.staging import Staging, Waiting
from support.server import form, png

NO_ROOM = OSError(errno.ENOSPC, "No space left on device")
PICTURES = [("a.png", png(Image.new("RGB", (8, 8), "red"))), ("b.png", png(Image.new("RGB", (8, 8), "blue")))]


def make(folder: Path, /, **keeper: Any) -> Service:
    """The API of a model that does not exist."""
    (folder / "waiting").mkdir()
    kept: Any = SimpleNamespace(**{"folder": folder / "model", "model": None, **keeper})
    return Service(kept, Staging(folder / "waiting", Limits(waiting_pictures=2)), Limits())


def ask(api: Service, method: str, path: str, body: bytes = b"", kind: str = "", until: str = "") -> tuple[int, bytes]:
    """Status and body of the answer; a stream is ended once it has said `until`."""
    app, (path, _, query) = build_app(api, "127.0.0.1", 7860, None), path.partition("?")
    headers = [(b"host", b"127.0.0.1:7860"), (b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": headers}
    scope |= {"http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 7860), "root_path": ""}
    parts: list[Message] = []

    async def send(message: Message) -> None:
        parts.append(message)
        if until and until in message.get("body", b"").decode():
            api.hub.closed = True
            api.hub._spread({})

    async def call() -> None:
        asked = False

        async def receive() -> Message:
            nonlocal asked
            if asked:
                await asyncio.sleep(60)
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}

        await asyncio.wait_for(app(scope, receive, send), 60)

    asyncio.run(call())
    return parts[0]["status"], b"".join(part.get("body", b"") for part in parts)


def test_asking_for_the_head_of_the_events_listens_to_nothing(tmp_path: Path) -> None:
    """A listener that is sent nothing would be held until the client leaves."""
    assert ask(make(tmp_path), "HEAD", "/api/events")[0] == 405


def test_a_full_disk_is_one_plain_sentence_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api, write = make(tmp_path), Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.suffix == ".picture":  # the thumbnail found room
            raise NO_ROOM
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    status, body = ask(api, "POST", "/api/waiting", *form("fox", PICTURES))
    assert status == 507 and b"is full; make room" in body
    assert not list(api.staging.folder.iterdir()) and not api.staging.classes()


def test_a_change_that_finds_no_room_says_the_same(tmp_path: Path) -> None:
    @contextmanager
    def changing(**how: Any) -> Iterator[None]:
        raise UserError("cannot write model.toml: No space left on device") from NO_ROOM
        yield

    assert ask(make(tmp_path, changing=changing), "DELETE", "/api/classes?name=fox")[0] == 507


def test_another_trouble_of_the_disk_is_not_called_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, data: bytes) -> int:
        raise OSError(errno.EIO, "Input/output error")

    api = make(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", broken)
    with pytest.raises(OSError, match="Input/output"):  # for the terminal; the client has its answer by then
        ask(api, "POST", "/api/waiting", *form("fox", PICTURES))


def test_those_before_a_refused_picture_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api, told = make(tmp_path), []
    monkeypatch.setattr(api.hub, "publish", lambda **events: told.extend(events))
    more = ("c.png", png(Image.new("RGB", (8, 8), "green")))
    assert ask(api, "POST", "/api/waiting", *form("fox", [*PICTURES, more]))[0] == 400
    assert len(api.staging.classes()["fox"]) == 2 and told == ["waiting"]


@pytest.mark.parametrize("charset", ["unicode_escape", "utf-16"])
def test_texts_of_a_form_are_utf8(charset: str, tmp_path: Path) -> None:
    api = make(tmp_path)
    body, kind = form(r"fox\ud800", PICTURES)
    assert ask(api, "POST", "/api/waiting", body, f"{kind}; charset={charset}")[0] == 415
    assert ask(api, "POST", "/api/waiting", body, f"{kind}; charset=UTF-8")[0] == 201
    assert ask(api, "GET", "/api/waiting")[0] == 200


def test_whoever_listens_hears_that_there_is_no_lesson(tmp_path: Path) -> None:
    """A page that was open when the server died in the middle of a lesson would wait for its end for ever."""
    status, body = ask(make(tmp_path), "GET", "/api/events", until="lesson")
    assert status == 200 and body == b"event: lesson\ndata: null\n\n"


def test_a_whole_request_is_not_waited_for() -> None:
    """Its length was not said, and whoever answers listens for the client to go away."""
    told: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b"x"
        told.append((await receive())["type"])

    async def receive() -> Message:
        if not told and not sent:
            sent.append(True)
            return {"type": "http.request", "body": b"x", "more_body": False}
        await asyncio.sleep(0.2)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    sent: list[bool] = []
    guarded: ASGIApp = Guard(app, "127.0.0.1", 7860, None, Limits(silent_seconds=0.05))
    headers = [(b"host", b"127.0.0.1:7860"), (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": "/api/predict", "query_string": b"", "headers": headers}
    asyncio.run(guarded(scope, receive, send))
    assert told == ["http.disconnect"]


def taught(
    folder: Path, small: Any, lesson: Lesson, classes: Sequence[str] = ("fox", "owl")
) -> tuple[Lessons, list[Waiting]]:
    """A lesson that ends well, and what waited for it."""

    @contextmanager
    def changing() -> Iterator[Any]:
        yield SimpleNamespace(learn=lambda source, **how: lesson, classes=classes)

    keeper: Any = SimpleNamespace(model=None, changing=changing)
    lessons = Lessons(keeper, Staging(folder, Limits()), small, Hub())
    lessons.state = LessonState(id="", classes={})
    return lessons, [Waiting("0" * 24, "fox", "a.png")]


def test_a_lesson_that_was_learnt_is_not_called_failed(tmp_path: Path) -> None:
    def follow(before: object) -> None:
        raise PermissionError("small pictures cannot be deleted")

    lessons, items = taught(tmp_path, SimpleNamespace(on=True, follow=follow), Lesson())
    lessons._run(items)
    assert lessons.state is not None and lessons.state.state == "done"
    assert "cannot be deleted" in lessons.state.result.warnings[0]


@pytest.mark.parametrize("classes", [["fox"], ["fox", "owl"]])
def test_one_class_has_no_accuracy(classes: list[str], tmp_path: Path) -> None:
    """It is right about every picture, which says nothing; `clipcil learn` and `show` do not tell it either."""
    lesson = Lesson(evaluation=Evaluation(pictures=6, right=6))
    lessons, items = taught(tmp_path, SimpleNamespace(on=False), lesson, classes=classes)
    lessons._run(items)
    told = [lessons.state and lessons.state.result and lessons.state.result.accuracy]
    day, known = "2026-01-31", [KnownClass(name, name, "", 6, "", 6, 6) for name in classes]
    facts = Facts("strata", {}, "mini", "", 0, ("{}",), 1, [len(known)], known)
    facts.history = [LessonRecord(day, 1, 0, 6, len(known), 6, 6)]
    model = SimpleNamespace(facts=lambda: facts)
    api = make(tmp_path, model=model, backbone="mini", revision=1, previous=lambda: None)
    about = json.loads(ask(api, "GET", "/api/model")[1])
    told += [each["accuracy"] for each in (about, *about["lessons"], *about["classes"])]
    assert set(told) == ({None} if len(classes) == 1 else {1.0})


def test_pages_hear_of_a_change_whose_small_pictures_could_not_follow(tmp_path: Path) -> None:
    def follow(before: object) -> None:
        raise UserError("small pictures cannot be deleted")

    api = make(tmp_path, model=SimpleNamespace(class_facts=[]), undo=lambda: None)
    api.small = SimpleNamespace(follow=follow)  # type: ignore[assignment]
    heard: list[str] = []
    api.hub.publish = lambda **events: heard.extend(events)  # type: ignore[method-assign]
    status, said = ask(api, "POST", "/api/undo")
    assert status == 400 and b"cannot be deleted" in said
    assert heard == ["model", "waiting"]


def test_a_download_is_of_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lesson ends while the model is packed."""
    known = [KnownClass("fox", "fox", "2026-01-31", 2, "2026-01-31")]
    facts, pack, folder = (
        Facts("simplecil", {}, "mini", "", 0, ("a {}.",), 1, [1], known),
        transfer._zip,
        tmp_path / "m",
    )
    write_model(folder, facts, {"x": torch.zeros(1)})

    def meanwhile(into: Path, files: list[Path]) -> Path:
        monkeypatch.setattr(transfer, "_zip", pack)
        write_model(folder, facts, {"x": torch.ones(1)})
        return pack(into, files)

    monkeypatch.setattr(transfer, "_zip", meanwhile)
    transfer.unpack_model(transfer.pack_model(folder, tmp_path / "m.zip"), tmp_path / "unpacked", 2**20)
    names = {path.name for path in (tmp_path / "unpacked").iterdir()}
    assert re.findall('weights = "(.*)"', (tmp_path / "unpacked" / "model.toml").read_text())[0] in names


def test_the_page_works_where_the_folder_is_not_utf8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"v\xf6gel")

    def refuse() -> None:
        raise UserError(f"cannot write {folder}")

    api = make(tmp_path, folder=folder, backbone="mini", revision=0, undo=refuse)
    assert ask(api, "GET", "/api/model")[0] == 200
    status, body = ask(api, "POST", "/api/undo")
    assert status == 400 and b"cannot write" in body

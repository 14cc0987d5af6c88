"""Single requests to the application, without a server: full disks, pictures that vanish, lessons that fail late."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from PIL import Image

from clipcil.classifier.lesson import Lesson
from clipcil.classifier.scoring import Evaluation
from clipcil.classifier.state import Facts, KnownClass, LessonRecord
from clipcil.errors import UserError
from clipcil.serve.answers import LessonState, Limits, explain
from clipcil.serve.api import Service
from clipcil.serve.model import Lessons
from clipcil.serve.server import build_app
from clipcil.serve.staging import Staging, Waiting
from support.server import form, png

PICTURES = [(f"{name}.png", png(Image.new("RGB", (8, 8), name))) for name in ("red", "blue", "green")]


def made_of(**parts: Any) -> Facts:
    return Facts(method="strata", settings={}, backbone="mini", fingerprint="", seed=0, templates=("{}",), **parts)


@pytest.fixture
def service(tmp_path: Path) -> Service:
    """The API of a model that does not exist."""
    (tmp_path / "waiting").mkdir()
    served: Any = SimpleNamespace(folder=tmp_path / "model", revision=0, small=SimpleNamespace(on=False))
    return Service(served, Staging(tmp_path / "waiting", Limits(waiting_pictures=2)), Limits())


def known_by(service: Service, facts: Facts) -> None:
    served: Any = service.served
    served.model, served.previous = SimpleNamespace(facts=lambda: facts), lambda: None


def ask(service: Service, method: str, path: str, **how: Any) -> httpx.Response:
    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(service, 7860, None))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7860") as client:
            return await client.request(method, path, **how)

    return asyncio.run(call())


def add(service: Service, count: int, name: str = "fox", **how: Any) -> httpx.Response:
    return ask(service, "POST", "/api/waiting", data={"name": name}, files=form(PICTURES[:count]), **how)


def test_a_full_disk_is_one_plain_sentence_and_nothing_is_left(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, trouble = Path.write_bytes, errno.ENOSPC

    def full(path: Path, data: bytes) -> int:
        if path.suffix == ".picture":  # the thumbnail found room
            raise OSError(trouble, os.strerror(trouble))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    answer = add(service, 2)
    assert answer.status_code == 507 and "full" in answer.json()["error"]
    assert not list(service.staging.folder.iterdir()) and not service.staging.classes()
    caused = UserError("cannot write model.toml")
    caused.__cause__ = OSError(trouble, os.strerror(trouble))
    assert explain(caused)[0] == 507, "a change of the model that finds no room says the same"
    trouble = errno.EIO  # not called full; for the terminal, the client has its answer by then
    with pytest.raises(OSError, match=os.strerror(trouble)):
        add(service, 2)


def test_those_before_a_refused_picture_wait(service: Service) -> None:
    assert add(service, 3).status_code == 400
    assert len(service.staging.classes()["fox"]) == 2 and service.staging.revision == 2


@pytest.mark.parametrize("name", ["", " _ ", "\u200b", "\u00ad \ufeff", "x" * 301])
def test_a_name_that_names_no_class_is_refused_when_it_comes(name: str, service: Service) -> None:
    """Else every lesson would fail because of a class whose card looks as if it had no name."""
    assert add(service, 1, name).status_code == 400
    assert not list(service.staging.folder.iterdir())


def test_text_that_no_answer_can_hold_is_refused_or_escaped(service: Service) -> None:
    body = '--x\r\nContent-Disposition: form-data; name="name"\r\n\r\n{}\r\n'
    body += '--x\r\nContent-Disposition: form-data; name="pictures"; filename="\\ud800"\r\n\r\n?\r\n--x--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=x; charset=unicode_escape"}
    for name, status in (("fox\\ud800", 400), ("fox", 201)):
        found = ask(service, "POST", "/api/waiting", content=body.format(name).encode(), headers=headers)
        assert found.status_code == status, found.text
    assert ask(service, "GET", "/api/waiting").json()["classes"][0]["pictures"][0]["title"] == "\\ud800"


def learnt(folder: Path, small: Any, lesson: Lesson, classes: int = 2) -> LessonState:
    """The state after a lesson that ends well."""
    served: Any = SimpleNamespace(small=small, model=None, revision=0)

    @contextmanager
    def change() -> Iterator[Any]:
        yield SimpleNamespace(learn=lambda source, **how: lesson)
        served.model = SimpleNamespace(classes=["fox", "owl"][:classes])
        small.follow()

    served.change = change
    lessons = Lessons(served, Staging(folder, Limits()))
    lessons.state = LessonState(id="", classes={})
    lessons._run([Waiting("0" * 24, "fox", "a.png", folder / "0.picture", 1, "", broken="is broken")])
    return lessons.state


def test_a_lesson_that_was_learnt_is_not_called_failed(tmp_path: Path) -> None:
    def follow() -> None:
        raise PermissionError("small pictures cannot be deleted")

    state = learnt(tmp_path, SimpleNamespace(follow=follow), Lesson())
    assert state.state == "done" and state.result is not None
    assert "cannot be deleted" in state.result.warnings[0]
    assert state.result.unreadable == ["a.png: is broken"]


@pytest.mark.parametrize("classes", [1, 2])
def test_one_class_has_no_accuracy(classes: int, service: Service, tmp_path: Path) -> None:
    """It is right about every picture, which says nothing; `clipcil learn` and `show` do not tell it either."""
    lesson = Lesson(evaluation=Evaluation(pictures=6, right=6))
    state = learnt(tmp_path, SimpleNamespace(follow=lambda: None), lesson, classes)
    assert state.result is not None
    day, known = "2026-01-31", [KnownClass(name, name, "", 6, "", 6, 6) for name in ("fox", "owl")[:classes]]
    facts = made_of(sizes=[classes], known=known)
    facts.history = [LessonRecord(day, 1, 0, 6, classes, 6, 6)]
    known_by(service, facts)
    about = ask(service, "GET", "/api/model").json()
    told = [state.result.accuracy, *(each["accuracy"] for each in (about, *about["lessons"], *about["classes"]))]
    assert set(told) == ({None} if classes == 1 else {1.0})


def test_the_page_works_where_the_folder_is_not_utf8(service: Service) -> None:
    known_by(service, made_of())
    service.served.folder = service.served.folder.with_name(os.fsdecode(b"v\xf6gel"))

    def refuse() -> None:
        raise UserError(f"cannot write {service.served.folder}")

    service.served.undo = refuse  # type: ignore[method-assign]
    answer = ask(service, "POST", "/api/undo")
    assert answer.status_code == 400 and "cannot write" in answer.json()["error"]
    assert ask(service, "GET", "/api/model").json()["name"] == "v\\udcf6gel"

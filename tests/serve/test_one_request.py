"""The application and its waiting pictures without a server: full disks, lessons that fail late, pictures at once."""

import asyncio
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from PIL import Image

from clipcil.classifier.lesson import Lesson
from clipcil.errors import UserError
from clipcil.serve import staging
from clipcil.serve.answers import LessonState, Limits, explain
from clipcil.serve.api import Service
from clipcil.serve.model import Lessons, ServedModel
from clipcil.serve.server import build_app
from clipcil.serve.staging import StagedPicture, Staging
from support.errors import one_line
from support.server import form, png

PICTURES = [(f"{name}.png", png(Image.new("RGB", (8, 8), name))) for name in ("red", "blue", "green")]
ONE, OTHER = PICTURES[0][1], PICTURES[1][1]


@pytest.fixture
def service(tmp_path: Path) -> Service:
    """The API of a model that does not exist."""
    (tmp_path / "waiting").mkdir()
    served: Any = SimpleNamespace(folder=tmp_path / "model", revision=0, small=SimpleNamespace(on=False))
    return Service(served, Staging(tmp_path / "waiting", Limits(waiting_pictures=2)), Limits())


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


def test_the_document_says_that_errors_are_json_and_bodies_are_needed(service: Service) -> None:
    for path, methods in ask(service, "GET", "/api/openapi.json").json()["paths"].items():
        for described in methods.values():
            assert list(described["responses"]["default"]["content"]) == ["application/json"], path
    assert ask(service, "POST", "/api/predict").status_code == 400


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


def test_a_lesson_that_was_learnt_is_not_called_failed(tmp_path: Path) -> None:
    """It keeps no small pictures, because those before it cannot be deleted."""
    served: Any = SimpleNamespace(model=None, revision=0)

    @contextmanager
    def change() -> Iterator[Any]:
        yield SimpleNamespace(learn=lambda source, **how: Lesson())
        served.model = SimpleNamespace(classes=["fox", "owl"])
        raise PermissionError("small pictures cannot be deleted")

    served.change = change
    lessons = Lessons(served, Staging(tmp_path, Limits()))
    lessons.state = LessonState(id="", classes={})
    lessons._run([StagedPicture("0" * 24, "fox", "a.png", tmp_path / "0.picture", 1, "", broken="is broken")])
    assert lessons.state.state == "done" and lessons.state.result is not None
    assert "cannot be deleted" in lessons.state.result.warnings[0]
    assert lessons.state.result.unreadable == ["a.png: is broken"]


def test_the_page_works_where_the_folder_is_not_utf8(service: Service, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"v\xf6gel")
    service.served = ServedModel(folder, "simplecil", None, "cpu", service.staging)
    assert ask(service, "GET", "/api/model").json()["name"] == "v\\udcf6gel"
    assert explain(UserError(f"cannot write {folder}")) == (400, f"cannot write {tmp_path}/v\\udcf6gel")


@pytest.mark.parametrize(
    ("meanwhile", "limits", "refused"),
    [(OTHER, Limits(waiting_pictures=1), True), (ONE, Limits(waiting_bytes=len(ONE)), False)],
    ids=["another picture", "the same picture"],
)
def test_limits_hold_for_pictures_that_are_decoded_at_once(
    meanwhile: bytes, limits: Limits, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture `meanwhile` comes while another one is decoded; the same picture twice at once waits once."""
    waiting, decode = Staging(tmp_path, limits), staging.decode

    def slow(picture: bytes, called: str) -> Image.Image:
        monkeypatch.setattr(staging, "decode", decode)
        waiting.add("b", "other.png", meanwhile)
        return decode(picture, called)

    monkeypatch.setattr(staging, "decode", slow)
    with one_line("1 pictures") if refused else nullcontext():
        assert waiting.add("B", "one.png", ONE).title == "other.png"
    assert [item.title for items in waiting.classes().values() for item in items] == ["other.png"]
    assert len(list(tmp_path.iterdir())) == 2  # the picture that waits and its thumbnail
    with one_line("pictures" if refused else "space"):
        waiting.add("b", "other.png", ONE if refused else OTHER)


def test_every_model_has_a_private_folder_for_its_waiting_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPCIL_CACHE", str(tmp_path))
    with staging.open_staging(tmp_path / "a", Limits()) as one, staging.open_staging(tmp_path / "b", Limits()) as other:
        assert one.folder != other.folder
        assert one.folder.stat().st_mode & 0o777 == 0o700

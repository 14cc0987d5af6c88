"""Pictures that arrive while another one is decoded, and the folder that they wait in."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from PIL import Image

from clipcil.serve import staging
from clipcil.serve.answers import Limits
from clipcil.serve.staging import Staging
from support.errors import one_line
from support.server import png

ONE, OTHER = (png(Image.new("RGB", (8, 8), colour)) for colour in ("red", "blue"))


def add_meanwhile(waiting: Staging, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `content` come as a picture of the class b while the next picture is decoded."""
    decode = staging.decode

    def slow(picture: bytes, called: str) -> Image.Image:
        monkeypatch.setattr(staging, "decode", decode)
        waiting.add("b", "other.png", content)
        return decode(picture, called)

    monkeypatch.setattr(staging, "decode", slow)


@pytest.mark.parametrize(
    ("meanwhile", "limits", "refused"),
    [(OTHER, Limits(waiting_pictures=1), True), (ONE, Limits(waiting_bytes=len(ONE)), False)],
    ids=["another picture", "the same picture"],
)
def test_limits_hold_for_pictures_that_are_decoded_at_once(
    meanwhile: bytes, limits: Limits, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same picture twice at once waits once."""
    waiting = Staging(tmp_path, limits)
    add_meanwhile(waiting, meanwhile, monkeypatch)
    with one_line("1 pictures") if refused else nullcontext():
        assert waiting.add("B", "one.png", ONE).title == "other.png"
    assert [item.title for items in waiting.classes().values() for item in items] == ["other.png"]
    assert len(list(tmp_path.iterdir())) == 2  # the picture that waits and its thumbnail
    with one_line("pictures" if refused else "space"):
        waiting.add("b", "other.png", ONE if refused else OTHER)


def test_the_folder_is_private_and_holds_nothing_of_a_killed_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPCIL_CACHE", str(tmp_path))
    model = tmp_path / "model"
    with staging.open_staging(model, Limits()) as first:
        assert first.folder.stat().st_mode & 0o777 == 0o700
        with staging.open_staging(tmp_path / "other", Limits()) as second:
            assert second.folder != first.folder
        left = first.folder
        first.add("fox", "a.png", ONE)
        with staging.open_staging(model, Limits()) as again:  # as if the first had been killed
            assert again.folder == left and not list(left.iterdir())
    assert list((tmp_path / "serve").iterdir()) == []

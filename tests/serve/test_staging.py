"""Pictures that arrive while another one is decoded."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from clipcil.data.pictures import readable_formats
from clipcil.errors import UserError
from clipcil.serve import staging
from clipcil.serve.guard import Limits
from clipcil.serve.staging import Staging


def picture(red: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (red, 0, 0)).save(out, "PNG")
    return out.getvalue()


def add_meanwhile(waiting: Staging, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `content` come as a picture of the class b while the next picture is decoded."""
    decode = staging.decode

    def slow(picture: bytes, called: str) -> Image.Image:
        monkeypatch.setattr(staging, "decode", decode)
        waiting.add("b", "other.png", content)
        return decode(picture, called)

    monkeypatch.setattr(staging, "decode", slow)


def test_the_limit_holds_for_pictures_that_are_decoded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Staging(tmp_path, Limits(waiting_pictures=1))
    add_meanwhile(waiting, picture(1), monkeypatch)
    with pytest.raises(UserError, match="1 pictures are waiting already"):
        waiting.add("b", "one.png", picture(2))
    assert [item.title for items in waiting.classes().values() for item in items] == ["other.png"]
    assert len(list(tmp_path.iterdir())) == 2  # the picture that waits and its thumbnail


def test_the_same_picture_twice_at_once_waits_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Staging(tmp_path, Limits())
    add_meanwhile(waiting, picture(1), monkeypatch)
    assert waiting.add("b", "one.png", picture(1)).title == "other.png"
    assert len(list(tmp_path.iterdir())) == 2


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
        first.add("fox", "a.png", picture(255))
        with staging.open_staging(model, Limits()) as again:  # as if the first had been killed
            assert again.folder == left and not list(left.iterdir())
    assert list((tmp_path / "serve").iterdir()) == []


@pytest.mark.parametrize("name", ["", " _ ", "\u200b", "\u00ad \ufeff"])
def test_a_name_that_nobody_can_see_is_refused_when_it_comes(name: str, tmp_path: Path) -> None:
    """Else every lesson would fail because of a class whose card looks as if it had no name."""
    with pytest.raises(UserError, match="a class needs a name"):
        Staging(tmp_path, Limits()).add(name, "a.png", picture(1))
    assert not list(tmp_path.iterdir())


def test_the_first_picture_of_a_phone_is_bounded_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads HEIC is not there before it is asked for."""
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.register_heif_opener()
    out = io.BytesIO()
    Image.new("RGB", (64, 64)).save(out, "HEIF")
    monkeypatch.delitem(Image.OPEN, "HEIF")
    readable_formats.cache_clear()
    assert "64×64" in (Limits(pixels=1000).refusal(out.getvalue()) or "")

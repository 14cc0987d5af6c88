"""Every kind of picture strangers send: read right, or named in one line."""

from __future__ import annotations

import io
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from clipcil.data.dataset import Dataset, drop_broken
from clipcil.data.pictures import PictureSet, decode, decoding_pool, identity_of_files, identity_of_pictures
from clipcil.data.sources import list_files, walk
from clipcil.errors import UserError
from support.made_up import encoded, picture, pixels

pytestmark = pytest.mark.filterwarnings("ignore")  # PIL's, about damaged metadata


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def huge_png(width: int, height: int) -> bytes:
    """A PNG whose header claims a size, a few bytes long."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


RED = Image.new("RGB", (8, 4), (250, 10, 10))


def near(image: Image.Image, colour: tuple[int, int, int], off: int = 6) -> bool:
    return bool(np.abs(np.asarray(image, dtype=int) - np.array(colour)).max() <= off)


def test_modes_become_rgb() -> None:
    cmyk = saved(RED.convert("CMYK"), "JPEG", quality=100, subsampling=0)
    assert Image.open(io.BytesIO(cmyk)).mode == "CMYK"
    assert near(decode(cmyk, "x"), (250, 10, 10))
    assert near(decode(saved(RED.convert("L"), "PNG"), "x"), (84, 84, 84))
    assert near(decode(saved(Image.new("1", (4, 4), 1), "PNG"), "x"), (255, 255, 255))
    assert decode(saved(Image.new("RGB", (1, 1), "blue"), "PNG"), "x").size == (1, 1)


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 32, dtype=np.uint16).reshape(1, 32).repeat(4, axis=0)
    for kind in ("PNG", "TIFF"):
        out = np.asarray(decode(saved(Image.fromarray(ramp), kind), "x"))
        np.testing.assert_allclose(out[0, :, 0], ramp[0] / 257.0, atol=1)
    dark = decode(saved(Image.fromarray(np.full((4, 4), 200, dtype=np.uint16)), "PNG"), "x")
    assert near(dark, (1, 1, 1), 1)  # 200 of 65535 is black, not light grey
    floats = Image.fromarray(np.array([[0.0, 0.5, 1.0, np.nan]], dtype=np.float32))
    assert np.asarray(decode(saved(floats, "TIFF"), "x"))[0, :, 0].tolist() == [0, 128, 255, 0]


def test_transparency_lies_on_white() -> None:
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert near(decode(saved(clear, "PNG"), "x"), (255, 255, 255))
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([9, 9, 9, 200, 0, 0])
    assert near(decode(saved(palette, "PNG", transparency=1), "x"), (255, 255, 255))
    assert near(decode(saved(palette, "PNG"), "x"), (200, 0, 0))
    assert near(decode(saved(Image.new("LA", (4, 4), (0, 0)), "PNG"), "x"), (255, 255, 255))
    few_colours = Image.new("RGBA", (4, 4), (200, 0, 0, 0)).quantize()  # its palette has four numbers for a colour
    assert few_colours.mode == "P" and near(decode(few_colours, "x"), (255, 255, 255))


def test_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "lime", "blue")]
    for kind in ("GIF", "PNG", "WEBP"):
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert near(decode(data, "x"), (255, 0, 0)), kind


def test_exif_turns_the_picture_upright() -> None:
    tag = Image.Exif()
    tag[0x0112] = 6  # turned by 90°
    wide = Image.fromarray(np.concatenate([np.full((8, 8, 3), 255, np.uint8), np.zeros((8, 24, 3), np.uint8)], axis=1))
    out = decode(saved(wide, "JPEG", exif=tag.tobytes(), quality=100), "x")
    assert out.size == (8, 32)
    assert near(out.crop((0, 0, 8, 7)), (255, 255, 255), 10)
    broken_tag = saved(wide, "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert decode(broken_tag, "x").size == (32, 8)


BROKEN: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "text": lambda: b"this is not a picture\n" * 20,
    "cut jpeg": lambda: saved(Image.fromarray(pixels(1, (64, 64))), "JPEG")[:-200],
    "cut png": lambda: saved(Image.fromarray(pixels(1, (64, 64))), "PNG")[:3000],
    "cut webp": lambda: saved(Image.fromarray(pixels(1, (64, 64))), "WEBP")[:1000],
    "bomb": lambda: huge_png(20_000, 20_000),
    "large": lambda: huge_png(12_000, 12_000),
    "postscript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_pictures_are_named_in_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "täst bild 1.jpg"
    path.write_bytes(BROKEN[kind]())
    with pytest.raises(UserError) as caught:
        decode(path, str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ("too large" in str(caught.value) or "Decompression" in str(caught.value)) == (kind in ("bomb", "large"))


def test_files_that_are_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "loop.jpg").symlink_to(tmp_path / "loop.jpg")
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.jpg").mkdir()
    for name in ("pipe", "loop", "gone", "folder"):
        with pytest.raises(UserError, match=f"{name}.jpg"):
            decode(tmp_path / f"{name}.jpg", f"{name}.jpg")


def test_the_contents_decide_not_the_ending(tmp_path: Path) -> None:
    path = tmp_path / "wrong.png"
    path.write_bytes(saved(RED, "JPEG", quality=100, subsampling=0))
    assert near(decode(path, "x"), (250, 10, 10))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "JPEG2000"]), st.data())
def test_damaged_files_never_raise_anything_else(kind: str, data: st.DataObject) -> None:
    content = bytearray(encoded(3, kind))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    try:
        assert decode(bytes(content), "x").mode == "RGB"
    except UserError as error:
        assert "\n" not in str(error)


def test_listing_ends_in_spite_of_loops_and_passes_over_what_is_no_picture(tmp_path: Path) -> None:
    for name in ("b/2.PNG", "b/10.jpg", "a b/ü 🐱.webp", ".hidden/1.png", "b/._2.png", "b/notes.txt", "deep/er/3.jpeg"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    (tmp_path / "b" / "up").symlink_to(tmp_path)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "deep")
    found = {path.relative_to(tmp_path).as_posix() for path in list_files(tmp_path)}
    own = {name for name in found if "up/" not in name}
    assert own == {"b/2.PNG", "b/10.jpg", "a b/ü 🐱.webp", "deep/er/3.jpeg"}
    assert not any(name.count("up/") > 1 for name in found)


def test_a_folder_deleted_while_it_is_listed_has_no_pictures(tmp_path: Path) -> None:
    """`predict --watch` looks every second, for months."""
    (tmp_path / "a").mkdir()
    for name in ("0.png", "a/1.png"):
        (tmp_path / name).write_bytes(b"")
    found = walk(tmp_path)
    assert next(found).name == "0.png"
    shutil.rmtree(tmp_path / "a")
    assert list(found) == []
    with pytest.raises(UserError, match="cannot look into"):
        list_files(tmp_path / "a")


def test_identity_follows_what_is_there(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("one", "two")]
    for root in roots:
        os.utime(picture(root / "a" / "x.png"), (1, 1))
    first, second = ([root / "a" / "x.png"] for root in roots)
    known = identity_of_files(first, roots[0])
    assert known == identity_of_files(first, roots[0])
    assert known != identity_of_files(second, roots[1]), "same names, sizes and times in another folder"
    os.utime(first[0], (2, 2))
    assert known != identity_of_files(first, roots[0])
    first[0].unlink()
    assert len(identity_of_files(first, roots[0])) == 24


def test_broken_pictures_are_left_out_and_listed(tmp_path: Path) -> None:
    good = [picture(tmp_path / f"{i}.png", i) for i in range(5)]
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"x")
    files = [*good[:2], bad, *good[2:]]
    train = PictureSet("train", files, torch.tensor([0, 0, 0, 1, 1, 1]), "a")
    test = PictureSet("test", [encoded(1), b""], torch.tensor([0, 1]), "b")
    steps: list[tuple[str, int, int]] = []
    data, lines = drop_broken(Dataset("mine", ["a", "b"], train, test), lambda *step: steps.append(step))
    assert [data.train.describe(i) for i in range(5)] == [str(path) for path in good]
    assert data.train.labels.tolist() == [0, 0, 1, 1, 1]
    assert data.test.labels.tolist() == [0]
    assert len(lines) == 2
    assert str(bad) in lines[0]
    assert "picture 1 of test" in lines[1]
    assert steps[-1] == ("check", 8, 8)
    assert data.train.identity == train.identity, "what is cached about the others stays good"


def photo(seed: int) -> Image.Image:
    return Image.fromarray(pixels(seed))


def with_palette(*colour: int) -> Image.Image:
    """A picture of one colour, which is in its palette alone."""
    image = Image.new("P", (8, 8), 0)
    image.putpalette(colour * 256)
    return image


def test_pictures_in_memory_are_told_apart_by_all_that_decides_how_they_look() -> None:
    red, blue, clear = with_palette(255, 0, 0), with_palette(0, 0, 255), with_palette(255, 0, 0)
    clear.info["transparency"] = 0
    lying = Image.new("RGB", (8, 4), "red")
    standing = lying.copy()
    standing.getexif()[274] = 6
    assert len({identity_of_pictures([each]) for each in (red, blue, clear, lying, standing)}) == 5
    assert identity_of_pictures([red]) == identity_of_pictures([with_palette(255, 0, 0)])
    assert decode(standing, "it").size == (4, 8), "as the same file by its path"


def test_a_picture_in_memory_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    file = tmp_path / "half.jpg"
    file.write_bytes(saved(Image.effect_noise((64, 64), 50).convert("RGB"), "JPEG")[:-400])
    for broken, message in (
        (Image.open(file), "OSError"),
        (Image.new("RGB", (0, 5)), "no pixels"),
        (np.zeros((0, 3)), "is not a picture"),
    ):
        with pytest.raises(UserError, match=message):
            data = Dataset.from_pictures("made", {"a": [broken], "b": [photo(1)]}, {"a": [photo(2)]})
            data.train.image(0)
    data = Dataset.from_pictures("made", {"a": [photo(0), Image.open(file)]}, {"a": [photo(2)]})
    whole, lines = drop_broken(data)
    assert len(whole.train) == 1 and len(lines) == 1
    assert decode(Image.new("La", (4, 4), (100, 255)), "it").getpixel((0, 0)) == (100, 100, 100)


def test_pictures_of_a_dataset_are_given_as_to_a_classifier(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    photo(3).save(file)
    data = Dataset.from_pictures("made", {"a": [str(file), np.asarray(photo(3))]}, {"a": [file.read_bytes()]})
    assert data.train.image(0).tobytes() == data.train.image(1).tobytes() == data.test.image(0).tobytes()
    with pytest.raises(UserError, match="class name 3 is of type int"):
        Dataset.from_pictures("made", {3: [photo(3)]}, {})  # type: ignore[dict-item]
    with pytest.raises(UserError, match="give the pictures of each class"):
        Dataset.from_pictures("made", [photo(3)], {})  # type: ignore[arg-type]


def test_one_picture_in_memory_may_be_given_many_times(tmp_path: Path) -> None:
    """PIL loads an opened file when its pixels are first asked for, which several threads may do at once."""
    noise = np.random.default_rng(0).integers(0, 255, (1200, 1600, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.jpg", quality=90)
    for _ in range(3):
        with Image.open(tmp_path / "noise.jpg") as image, decoding_pool() as pool:
            found = list(pool.map(lambda called, image=image: decode(image, called), "abcdefgh"))  # type: ignore[misc]
        assert len({each.tobytes() for each in found}) == 1

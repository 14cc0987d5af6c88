"""Every kind of picture strangers send: read right, or named in one line."""

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from support.errors import one_line
from support.made_up import encoded, picture, pixels

pytestmark = pytest.mark.filterwarnings("ignore")  # PIL's, about damaged metadata
RED, BLUE, WHITE = (250, 10, 10), (0, 0, 255), (255, 255, 255)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def photo(seed: int, side: int = 8) -> Image.Image:
    return Image.fromarray(pixels(seed, (side, side)))


def palette(*colours: int) -> Image.Image:
    """A picture of the second colour of its palette."""
    image = Image.new("P", (8, 8), 1)
    image.putpalette(colours)
    return image


def near(picture: bytes | Image.Image, colour: tuple[int, int, int], off: int = 6) -> bool:
    return bool(np.abs(np.asarray(decode(picture, "x"), dtype=int) - np.array(colour)).max() <= off)


def animation(kind: str) -> bytes:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, BLUE)]
    return saved(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)


CLEAR = palette(9, 9, 9, 200, 0, 0)
CLEAR.info["transparency"] = 1
MODES = [
    (saved(Image.new("CMYK", (4, 4), (0, 245, 245, 5)), "JPEG", quality=100, subsampling=0), RED),
    (saved(Image.new("L", (4, 4), 84), "PNG"), (84, 84, 84)),
    (saved(Image.new("1", (4, 4), 1), "PNG"), WHITE),
    (saved(Image.new("RGB", (1, 1), "blue"), "PNG"), BLUE),
    (saved(Image.fromarray(np.full((4, 4), 200, dtype=np.uint16)), "PNG"), (1, 1, 1)),  # 200 of 65535 is black
    (saved(Image.new("RGBA", (4, 4), (0, 0, 0, 0)), "PNG"), WHITE),
    (saved(Image.new("LA", (4, 4), (0, 0)), "PNG"), WHITE),
    (Image.new("La", (4, 4), (100, 255)), (100, 100, 100)),
    (saved(palette(9, 9, 9, 200, 0, 0), "PNG"), (200, 0, 0)),
    (saved(palette(9, 9, 9, 200, 0, 0), "PNG", transparency=1), WHITE),
    (Image.new("RGBA", (4, 4), (200, 0, 0, 0)).quantize(), WHITE),  # its palette has four numbers for a colour
    *[(animation(kind), RED) for kind in ("GIF", "PNG", "WEBP")],  # its first frame
]


@pytest.mark.parametrize(("content", "colour"), MODES)
def test_modes_become_rgb_on_white(content: Any, colour: tuple[int, int, int]) -> None:
    assert near(content, colour)


def test_sixteen_bits_and_floats_are_scaled_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 32, dtype=np.uint16).reshape(1, 32).repeat(4, axis=0)
    for kind in ("PNG", "TIFF"):
        out = np.asarray(decode(saved(Image.fromarray(ramp), kind), "x"))
        np.testing.assert_allclose(out[0, :, 0], ramp[0] / 257.0, atol=1)
    floats = Image.fromarray(np.array([[0.0, 0.5, 1.0, np.nan]], dtype=np.float32))
    assert np.asarray(decode(saved(floats, "TIFF"), "x"))[0, :, 0].tolist() == [0, 128, 255, 0]


def test_exif_turns_the_picture_upright() -> None:
    tag = Image.Exif()
    tag[0x0112] = 6  # turned by 90°
    wide = Image.fromarray(np.concatenate([np.full((8, 8, 3), 255, np.uint8), np.zeros((8, 24, 3), np.uint8)], axis=1))
    out = decode(saved(wide, "JPEG", exif=tag.tobytes(), quality=100), "x")
    assert out.size == (8, 32) and near(out.crop((0, 0, 8, 7)), WHITE, 10)
    broken_tag = saved(wide, "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert decode(broken_tag, "x").size == (32, 8)


BROKEN: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "text": lambda: b"this is not a picture\n" * 20,
    "cut jpeg": lambda: saved(photo(1, 64), "JPEG")[:-200],
    "cut png": lambda: saved(photo(1, 64), "PNG")[:3000],
    "cut webp": lambda: saved(photo(1, 64), "WEBP")[:1000],
    "bomb": lambda: b"P6 20000 20000 255\n" + bytes(99),  # a header that claims a size
    "large": lambda: b"P6 12000 12000 255\n" + bytes(99),
    "postscript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_pictures_are_named_in_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "täst bild 1.jpg"
    path.write_bytes(BROKEN[kind]())
    said = {"bomb": "Decompression", "large": "too large"}.get(kind, "not a picture")
    with one_line(str(path), said):
        decode(path, str(path))


def test_files_that_are_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "loop.jpg").symlink_to(tmp_path / "loop.jpg")
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.jpg").mkdir()
    for name in ("pipe", "loop", "gone", "folder"):
        with one_line(f"{name}.jpg"):
            decode(tmp_path / f"{name}.jpg", f"{name}.jpg")


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
    assert found == {"b/2.PNG", "b/10.jpg", "a b/ü 🐱.webp", "deep/er/3.jpeg"}


def test_a_folder_deleted_while_it_is_listed_has_no_pictures(tmp_path: Path) -> None:
    """`predict --watch` looks every second, for months."""
    (tmp_path / "a").mkdir()
    for name in ("0.png", "a/1.png"):
        (tmp_path / name).write_bytes(b"")
    found = walk(tmp_path)
    assert next(found).name == "0.png"
    shutil.rmtree(tmp_path / "a")
    assert list(found) == []
    with one_line(str(tmp_path / "a")):
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


def test_pictures_in_memory_are_told_apart_by_all_that_decides_how_they_look() -> None:
    lying = Image.new("RGB", (8, 4), "red")
    standing = lying.copy()
    standing.getexif()[274] = 6
    different = (palette(9, 9, 9, 200, 0, 0), palette(9, 9, 9, 0, 0, 200), CLEAR, lying, standing)
    assert len({identity_of_pictures([each]) for each in different}) == 5
    assert identity_of_pictures([different[0]]) == identity_of_pictures([palette(9, 9, 9, 200, 0, 0)])
    assert decode(standing, "it").size == (4, 8), "as the same file by its path"


def test_broken_pictures_are_left_out_and_listed(tmp_path: Path) -> None:
    good = [picture(tmp_path / f"{i}.png", i) for i in range(5)]
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"x")
    train = PictureSet("train", [*good[:2], bad, *good[2:]], torch.tensor([0, 0, 0, 1, 1, 1]), "a")
    test = PictureSet("test", [encoded(1), b""], torch.tensor([0, 1]), "b")
    steps: list[tuple[str, int, int]] = []
    data, lines = drop_broken(Dataset("mine", ["a", "b"], train, test), lambda *step: steps.append(step))
    assert [data.train.describe(i) for i in range(5)] == [str(path) for path in good]
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 0, 1, 1, 1], [0])
    assert len(lines) == 2 and str(bad) in lines[0] and "picture 1 of test" in lines[1]
    assert steps[-1] == ("check", 8, 8)
    assert data.train.identity == train.identity, "what is cached about the others stays good"
    assert len(drop_broken(Dataset("mine", ["a", "b"], train, test.subset(torch.tensor([1]))))[0].test) == 0


def test_pictures_of_ones_own_are_files_bytes_images_and_arrays(tmp_path: Path) -> None:
    file = tmp_path / "a.png"

    def make(seed: int) -> Dataset:
        photo(seed).save(file)
        train = {"a": [str(file), photo(seed), np.asarray(photo(seed))], "b": [file]}
        return Dataset.from_pictures("own", train, {"b": [file.read_bytes()]})

    first, again, other = make(1), make(1), make(2)
    assert first.train.labels.tolist() == [0, 0, 0, 1] and first.test.labels.tolist() == [1]
    assert len({other.train.image(row).tobytes() for row in range(4)} | {other.test.image(0).tobytes()}) == 1
    assert first.test.key == again.test.key != other.test.key, "pictures in memory are known by their contents"
    for train, test, said in (
        ({3: [photo(3)]}, {}, "3 is of type int"),
        ([photo(3)], {}, "own"),
        ({"a": []}, {"c": []}, "'c'"),
        ({"a": [np.zeros((0, 3))]}, {}, "shape"),
    ):
        with one_line(said):
            Dataset.from_pictures("own", train, test)  # type: ignore[arg-type]


def test_a_picture_in_memory_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    file = tmp_path / "half.jpg"
    file.write_bytes(saved(photo(0, 64), "JPEG")[:-400])
    for broken in (Image.open(file), Image.new("RGB", (0, 5))):
        data = Dataset.from_pictures("made", {"a": [photo(0), broken]}, {"a": [photo(2)]})
        with one_line("picture 1 of made train"):
            data.train.image(1)
        assert len(drop_broken(data)[0].train) == 1


def test_one_picture_in_memory_may_be_given_many_times(tmp_path: Path) -> None:
    """PIL loads an opened file when its pixels are first asked for, which several threads may do at once."""
    Image.fromarray(pixels(0, (1600, 1200))).save(tmp_path / "noise.jpg", quality=90)
    for _ in range(3):
        with Image.open(tmp_path / "noise.jpg") as image, decoding_pool() as pool:
            found = list(pool.map(lambda called, image=image: decode(image, called), "abcdefgh"))  # type: ignore[misc]
        assert len({each.tobytes() for each in found}) == 1


FORKS = 30
FORKING = """
import os, sys, threading
import torch
from clipcil.data import pictures

pictures.DECODING_THREADS = 16
torch.set_num_threads(16)
picture = torch.zeros(512, 512, 3, dtype=torch.uint8)

def convert(_):
    together.wait()
    return picture.permute(2, 0, 1).to(torch.float32, memory_format=torch.contiguous_format).sum()

failed = 0
for _ in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        together = threading.Barrier(16)
        try:
            with pictures.decoding_pool() as pool:
                list(pool.map(convert, range(16)))
        except RuntimeError as error:
            print(error, flush=True)
            os._exit(1)
        os._exit(0)
    failed += os.waitpid(child, 0)[1] != 0
sys.exit(f"{failed} of {sys.argv[1]} failed" if failed else 0)
"""


def test_threads_of_a_forked_process_set_torch_up_one_after_the_other() -> None:
    """Without that about a quarter of these children fail with "Invalid thread pool!"."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", FORKING, str(FORKS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

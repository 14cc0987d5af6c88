"""Small files made to take hours or all memory are refused at once, in one line, by the limits of `clipcil.limits`.

Version 0.2.0 has none of these limits: there every test fails, or its file takes the time and memory that its docstring
names (in full size; the files here are the smallest that show the limit).
"""

import io
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from clipcil.data.bombs import MeteredFile
from clipcil.data.dataset import open_dataset
from clipcil.data.pictures import decode
from clipcil.errors import UserError
from clipcil.limits import MOST_NUMBERS, MOST_PICTURE, MOST_PLAIN, MOST_READS, MOST_SCANS, MOST_SEGMENTS
from clipcil.serve.answers import Limits
from clipcil.serve.staging import Staging
from support.errors import one_line


def saved(kind: str, size: tuple[int, int] = (16, 16), **options: object) -> bytes:
    file = io.BytesIO()
    Image.new("P" if kind == "GIF" else "RGB", size).save(file, kind, **options)
    return file.getvalue()


def segments(count: int) -> bytes:
    """A JPEG with so many segments of EXIF: 180,000 of them, 3.6 MB, took 19 s."""
    jpeg = saved("JPEG")
    return jpeg[:2] + (b"\xff\xe1" + struct.pack(">H", 18) + b"Exif\0\0" + b"x" * 10) * count + jpeg[2:]


def scans(count: int, size: tuple[int, int] = (16, 16)) -> bytes:
    """A progressive JPEG with its last scan repeated: 1,200 scans of 7,000 × 7,000 pixels, 187 kB, took 62 s."""
    jpeg = saved("JPEG", size, progressive=True)
    return jpeg[:-2] + jpeg[jpeg.rindex(b"\xff\xda") : -2] * count + jpeg[-2:]


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def chunks(count: int) -> bytes:
    """A PNG with so many empty private chunks: 2,000,000, 24 MB, took 10 s."""
    png = saved("PNG")
    return png[:33] + chunk(b"prVt") * count + png[33:]


def pieces() -> bytes:
    """A PNG whose pixels come in pieces of a byte."""
    png, pixels = saved("PNG"), zlib.compress(bytes(600 * 601), 0)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 600, 600, 8, 0, 0, 0, 0))
    return png[:8] + header + b"".join(chunk(b"IDAT", pixels[i : i + 1]) for i in range(len(pixels))) + chunk(b"IEND")


def remarks(count: int) -> bytes:
    """A GIF with so many remarks."""
    gif = saved("GIF")
    return gif[: (at := gif.index(b",\0\0\0\0"))] + b"!\xfe\1x\0" * count + gif[at:]


def tiff(*tags: tuple[int, int, int, int], order: str = "<", big: bool = False, end: bytes = b"") -> bytes:
    """A TIFF of 16 × 16 grey pixels with more tags (number, type, count, value or place)."""
    every = [(256, 4, 1, 16), (257, 4, 1, 16), (258, 4, 1, 8), (259, 4, 1, 1), (262, 4, 1, 1), *tags]
    mark = (b"II" if order == "<" else b"MM") + struct.pack(order + "H", 43 if big else 42)
    head = mark + struct.pack(order + ("HHQQ" if big else "IH"), *((8, 0, 16, len(every)) if big else (8, len(every))))
    body = b"".join(struct.pack(order + ("HHQQ" if big else "HHII"), *tag) for tag in every)
    return head + body + bytes(8 if big else 4) + end


STRIPS = (273, 4, MOST_NUMBERS + 1, 8)
BOMBS = {
    "segments.jpg": (lambda: segments(MOST_SEGMENTS), "segments"),
    "scans.jpg": (lambda: scans(MOST_SCANS), "scans"),
    "fill.jpg": (lambda: b"\xff\xd8" + b"\xff" * 10**6 + saved("JPEG")[2:], "parts"),  # 30 MB took 10 s
    "junk.jpg": (lambda: segments(1)[:40] + bytes(10**6) + saved("JPEG")[2:], "parts"),
    "chunks.png": (lambda: chunks(MOST_READS // 2), "parts"),
    "pieces.png": (pieces, "parts"),
    "remarks.gif": (lambda: remarks(MOST_READS // 3), "parts"),
    "digits.ppm": (lambda: b"P3 600 600 255\n" + b"1 " * (MOST_PLAIN // 2), "digits"),  # 54 MB took 10 s
    "remarks.pgm": (lambda: b"P2 8 8 255\n" + b"#\n" * 1000 + b"1 " * 64, "digits"),  # 1 MB of remarks took minutes
    "strips.tiff": (lambda: tiff(STRIPS), "numbers"),  # 20 million strips, 80 MB, took 8 GB
    "strips-mm.tiff": (lambda: tiff(STRIPS, order=">"), "numbers"),
    "strips-big.tiff": (lambda: tiff(STRIPS, big=True), "numbers"),
    "tile.tiff": (lambda: tiff((322, 4, 1, 30_000), (323, 4, 1, 30_000), (324, 4, 1, 8), (325, 4, 1, 9)), "pixels"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_picture_that_takes_too_long_is_refused_by_its_parts(name: str) -> None:
    make, said = BOMBS[name]
    with one_line(name, "too large", said):
        decode(make(), name)


@pytest.mark.parametrize(
    "whole",
    [
        segments(MOST_SEGMENTS - 20),
        scans(MOST_SCANS - 12) + b"\xff\xda" * 1000,  # phones append films to pictures
        chunks(1000),
        remarks(1000),
        b"P3 1 1 255\n# a remark\n1 2 3",
        tiff((273, 4, 1, 90), (279, 4, 1, 256), end=bytes(256)),
        saved("TIFF", compression="tiff_lzw"),
    ],
)
def test_a_picture_of_a_few_parts_more_than_usual_is_read(whole: bytes) -> None:
    assert decode(whole, "it").mode == "RGB"


def test_a_decoder_may_read_only_so_often() -> None:
    file = MeteredFile(bytes(10))
    for _ in range(MOST_READS):
        file.read(0)
    with pytest.raises(UserError, match="parts"):
        file.read(0)


@pytest.mark.parametrize("kind", ["WEBP", "AVIF", "JPEG"])
def test_a_long_file_is_refused_before_it_is_read(kind: str, tmp_path: Path) -> None:
    """A WebP of 16 × 16 pixels made 3 GiB long by `truncate` took 6.4 GB."""
    path = tmp_path / "long"
    path.write_bytes(saved(kind))
    with path.open("r+b") as file:
        file.truncate(MOST_PICTURE + 1)
    with one_line(str(path), "too large", "MiB"):
        decode(path, str(path))


JPEG2000 = saved("JPEG2000")


def test_jpeg_2000_is_read_only_where_a_dataset_asks_for_it(tmp_path: Path) -> None:
    """106 bytes that claim 7,000 × 7,000 pixels in blocks of 4 × 4 took 6.6 GB and 30 s."""
    with one_line("not a picture"):
        decode(JPEG2000, "it")
    assert Staging(tmp_path, Limits()).add("ant", "a.jp2", JPEG2000).broken, "the server has no such option"
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        for number in range(5):
            (tmp_path / name / f"{number}.jp2").write_bytes(JPEG2000)
    with one_line("no pictures"):
        open_dataset("folder", tmp_path)
    found = open_dataset("folder", tmp_path, {"jpeg2000": True})
    assert len(found.train) == 8 and found.train.subset(found.train.labels == 1).image(0).size == (16, 16)

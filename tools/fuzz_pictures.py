"""Pictures of every kind, whole and damaged, and things in a class folder that are no ordinary picture file."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

from PIL import Image


def picture(chance: Random, mode: str = "RGB", size: tuple[int, int] | None = None) -> Image.Image:
    size = size or (chance.randint(1, 40), chance.randint(1, 40))
    if mode == "I;16":
        return Image.frombytes(mode, size, chance.randbytes(2 * size[0] * size[1]))
    if mode == "F":
        return Image.frombytes(mode, size, struct.pack(f"{size[0] * size[1]}f", *range(size[0] * size[1])))
    grey = Image.frombytes("L", size, chance.randbytes(size[0] * size[1]))
    return grey if mode == "L" else grey.convert("RGB").convert(mode)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG that claims a size its data does not have."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def damaged(data: bytes, chance: Random) -> bytes:
    """The bytes cut, lengthened, overwritten or replaced."""
    kind = chance.randrange(6)
    if kind == 0:
        return data[: chance.randrange(len(data) + 1)]
    if kind == 1:
        return b""
    if kind == 2:
        return chance.randbytes(chance.randint(1, 300))
    if kind == 3:
        return data + chance.randbytes(20)
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 30))):
        if changed:
            changed[chance.randrange(min(len(changed), chance.choice((64, 10**9))))] = chance.randrange(256)
    return bytes(changed)


def exif_turned(chance: Random) -> bytes:
    image, exif = picture(chance), Image.Exif()
    exif[0x0112] = chance.randint(0, 12)
    return encoded(image, "JPEG", exif=exif.tobytes())


def animated(chance: Random) -> bytes:
    frames = [picture(chance, size=(9, 9)) for _ in range(3)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


def palette(chance: Random) -> bytes:
    return encoded(picture(chance).quantize(8), "PNG", transparency=chance.choice((0, bytes(range(8)))))


KINDS: tuple[Callable[[Random], bytes], ...] = (
    lambda c: encoded(picture(c), c.choice(("PNG", "JPEG", "BMP", "WEBP", "TIFF", "PPM"))),
    lambda c: damaged(encoded(picture(c), c.choice(("PNG", "JPEG", "GIF", "WEBP", "TIFF"))), c),
    lambda c: damaged(encoded(picture(c), c.choice(("PNG", "JPEG", "GIF", "WEBP", "TIFF"))), c),
    lambda c: b"",
    lambda c: b"this is not a picture",
    lambda c: bomb(c.choice((20_000, 65_000, 2**31 - 1)), c.choice((1, 20_000, 65_000))),
    lambda c: encoded(picture(c, "CMYK"), "JPEG"),
    lambda c: encoded(picture(c, "I;16"), "PNG"),
    lambda c: encoded(picture(c, "F"), "TIFF"),
    lambda c: encoded(picture(c, "1"), "PNG"),
    lambda c: encoded(picture(c, "RGBA"), "PNG"),
    lambda c: encoded(picture(c, size=c.choice(((1, 1), (1, 3000), (3000, 1)))), "PNG"),
    exif_turned,
    animated,
    palette,
    lambda c: b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    lambda c: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
)


def add_oddity(folder: Path, chance: Random) -> None:
    """Something in a class folder that is no ordinary picture file."""
    stem = chance.choice(("a b", "größe", "🦊", "-rf", "'", "line\nbreak", "x" * 200, "\udcff\udcfe"))
    path = folder / f"{stem}.{chance.choice(('png', 'jpg', 'JPEG', 'gif'))}"
    kind = chance.randrange(7)
    if os.path.lexists(path) or (folder / "loop").is_symlink():
        return
    if kind == 0:
        path.symlink_to(path)
    elif kind == 1:
        path.symlink_to(folder / "nothing.png")
    elif kind == 2:
        (folder / "loop").symlink_to(folder, target_is_directory=True)
    elif kind == 3:
        path.mkdir()
    elif kind == 4:
        os.mkfifo(path)
    else:
        path.write_bytes(chance.choice(KINDS)(chance))

"""Pictures of every kind, whole and damaged, and things in a class folder that are not ordinary picture files."""

import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

from PIL import Image


def picture(chance: Random, mode: str = "RGB", size: tuple[int, int] | None = None) -> Image.Image:
    """A picture of random numbers."""
    size = size or (chance.randint(1, 40), chance.randint(1, 40))
    if mode == "I;16":
        return Image.frombytes(mode, size, chance.randbytes(2 * size[0] * size[1]))
    if mode == "F":
        return Image.frombytes(mode, size, struct.pack(f"{size[0] * size[1]}f", *range(size[0] * size[1])))
    grey = Image.frombytes("L", size, chance.randbytes(size[0] * size[1]))
    return grey if mode == "L" else grey.convert("RGB").convert(mode)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    """The bytes of a picture file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG that claims a size its data does not have."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def damaged(data: bytes, chance: Random) -> bytes:
    """The bytes cut, lengthened, overwritten or replaced."""
    kind = chance.randrange(6)
    if kind < 4:
        cut = data[: chance.randrange(len(data) + 1)]
        return (cut, b"", chance.randbytes(chance.randint(1, 300)), data + chance.randbytes(20))[kind]
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 30)) if data else 0):
        changed[chance.randrange(min(len(changed), chance.choice((64, 10**9))))] = chance.randrange(256)
    return bytes(changed)


def turned(chance: Random) -> bytes:
    """A JPEG with an orientation in its EXIF data."""
    exif = Image.Exif()
    exif[0x0112] = chance.randint(0, 12)
    return encoded(picture(chance), "JPEG", exif=exif.tobytes())


def animated(chance: Random) -> bytes:
    """A GIF of three frames."""
    frames = [picture(chance, size=(9, 9)) for _ in range(3)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


KINDS: tuple[Callable[[Random], bytes], ...] = (
    lambda c: encoded(picture(c), c.choice(("PNG", "JPEG", "BMP", "WEBP", "TIFF", "PPM"))),
    lambda c: damaged(encoded(picture(c), c.choice(("PNG", "JPEG", "GIF", "WEBP", "TIFF"))), c),
    lambda c: damaged(encoded(picture(c), c.choice(("PNG", "JPEG", "GIF", "WEBP", "TIFF"))), c),
    lambda c: c.choice((b"", b"no picture", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%!PS-Adobe-3.0")),
    lambda c: bomb(c.choice((20_000, 65_000, 2**31 - 1)), c.choice((1, 20_000, 65_000))),
    lambda c: encoded(picture(c, c.choice(("CMYK", "L"))), "JPEG"),
    lambda c: encoded(picture(c, c.choice(("I;16", "1", "RGBA"))), "PNG"),
    lambda c: encoded(picture(c, "F"), "TIFF"),
    lambda c: encoded(picture(c, size=c.choice(((1, 1), (1, 3000), (3000, 1)))), "PNG"),
    lambda c: encoded(picture(c).quantize(8), "PNG", transparency=c.choice((0, bytes(range(8))))),
    turned,
    animated,
)


def add_oddity(folder: Path, chance: Random) -> None:
    """Something in a class folder that is not an ordinary picture file."""
    stem = chance.choice(("a b", "größe", "🦊", "-rf", "'", "line\nbreak", "x" * 200, "\udcff\udcfe"))
    path = folder / f"{stem}.{chance.choice(('png', 'jpg', 'JPEG', 'gif'))}"
    if os.path.lexists(path):
        return
    kind = chance.randrange(6)
    if kind < 3:
        path.symlink_to((path, folder / "nothing.png", folder)[kind])
    elif kind == 3:
        path.mkdir()
    elif kind == 4:
        os.mkfifo(path)
    else:
        path.write_bytes(chance.choice(KINDS)(chance))

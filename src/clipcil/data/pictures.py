"""Pictures with labels, and the one way to decode them. Pictures may come from strangers."""

from __future__ import annotations

import hashlib
import io
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from clipcil.data.bombs import BombError, MeteredFile, refuse_bombs
from clipcil.errors import UserError, first_line
from clipcil.limits import LARGE_PICTURE, MOST_PICTURE, MOST_PIXELS, MOST_ROWS
from clipcil.storage import MissingFileError, open_regular

T = TypeVar("T")
Picture = Path | bytes | Image.Image
"""A picture: a file, the bytes of an encoded file, or a decoded picture in memory."""

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "HEIF")
"""Allowed formats of picture files, whatever their ending. Not all that PIL can open: some start other programs, and
100 bytes of JPEG 2000 can take minutes and 10 GB."""
STRIP = 2**20
"""Pixels converted at a time where a conversion needs many bytes for each."""
DECODING_THREADS = 4
"""Threads that decode pictures ahead of the pass that needs them."""
TILE_WIDTH, TILE_HEIGHT = ExifTags.Base.TileWidth, ExifTags.Base.TileLength
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")

_turn = threading.RLock()
"""Held by the thread that decodes a large picture."""
_in_memory = tuple(threading.Lock() for _ in range(64))
"""Locks for pictures in memory, shared out by `id`. A caller may give one `Image` several times, and PIL loads its
pixels and its EXIF tags when they are first asked for: two threads that do so at once get a broken picture."""

# PIL warns about harmless metadata; real damage raises. Set once, here: filters cannot be set within a thread.
warnings.filterwarnings("ignore", module=r"PIL\.")


def decoding_pool() -> ThreadPoolExecutor:
    """Threads that decode and preprocess pictures.

    Each sets torch up for itself before its first picture, one after the other: in a forked process torch replaces its
    own threads at that moment, and fails with "Invalid thread pool!" where two threads do so at once.
    """
    one_at_a_time = threading.Lock()

    def start() -> None:
        with one_at_a_time:
            torch.get_num_threads()

    return ThreadPoolExecutor(DECODING_THREADS, initializer=start)


class BrokenPictureError(UserError):
    """A picture that cannot be decoded, or must not be."""


class PictureSet:
    """A fixed list of pictures and the class index of each. `subset` shares the list, so caches are shared too.

    Args:
        name: Name of the set in messages.
        pictures: The list of pictures.
        labels: (N,) int64, one class index for each row.
        identity: Fingerprint of the whole list of pictures; the key of what is cached about them.
        rows: (N,) int64, which pictures of the list the rows are; None: all of them.
    """

    def __init__(
        self, name: str, pictures: Sequence[Picture], labels: Tensor, identity: str, rows: Tensor | None = None
    ) -> None:
        self.name, self.pictures, self.labels, self.identity = name, pictures, labels, identity
        self.rows = torch.arange(len(pictures)) if rows is None else rows
        self.more_formats: tuple[str, ...] = ()
        """Formats that are read here besides `FORMATS`."""
        if len(self.rows) != len(labels):
            raise UserError(f"{name}: {len(self.rows)} pictures but {len(labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def key(self) -> str:
        """Fingerprint of exactly these rows in this order."""
        return f"{self.identity}:{hashlib.sha256(self.rows.numpy().tobytes()).hexdigest()[:16]}"

    def subset(self, keep: Tensor, labels: Tensor | None = None) -> PictureSet:
        """The rows `keep` (indices into this set, or a mask), with new labels where they are given."""
        labels = self.labels[keep] if labels is None else labels
        part = PictureSet(self.name, self.pictures, labels, self.identity, self.rows[keep])
        part.more_formats = self.more_formats
        return part

    def split(self, is_test: Tensor) -> tuple[PictureSet, PictureSet]:
        """The training and the test pictures, by a mask (N,) of the test pictures."""
        return self.subset(~is_test), self.subset(is_test)

    def describe(self, index: int) -> str:
        """The name of row `index` in messages: its file, or its place in the list."""
        return self.describe_place(int(self.rows[index]))

    def describe_place(self, place: int) -> str:
        """The name of picture `place` of the whole list."""
        picture = self.pictures[place]
        return str(picture) if isinstance(picture, Path) else f"picture {place} of {self.name}"

    def image(self, index: int) -> Image.Image:
        """Row `index`, decoded, upright, RGB on white."""
        return self.decode_and(int(self.rows[index]), lambda image: image)

    def decode_and(self, place: int, then: Callable[[Image.Image], T]) -> T:
        """`decode_and` of this module for picture `place` of the whole list."""
        return decode_and(self.pictures[place], self.describe_place(place), then, self.more_formats)

    def fault(self, index: int) -> str | None:
        """Why row `index` cannot be decoded; None if it can."""
        try:
            self.image(index)
        except UserError as error:
            return str(error)
        return None


class LazyPictures(Sequence[Picture]):
    """Pictures that `make(place)` gives when they are asked for."""

    def __init__(self, count: int, make: Callable[[int], Picture]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> Picture:  # type: ignore[override]  # nobody takes a slice
        return self._make(range(self._count)[place])


def decode(picture: Picture, called: str) -> Image.Image:
    """Decode to RGB: the first frame of an animation, turned upright by its EXIF tag, transparency laid on white."""
    return decode_and(picture, called, lambda image: image)


def decode_and(
    picture: Picture, called: str, then: Callable[[Image.Image], T], more_formats: tuple[str, ...] = ()
) -> T:
    """`then(decode(picture, called))`, for a function that makes something small of the picture.

    Pictures of more than `LARGE_PICTURE` pixels are decoded one at a time, until `then` is done, so that all threads
    together need the memory of one: up to 20 bytes per pixel (greys of 16 bits).
    """
    with ExitStack() as turn:
        return then(_decode(picture, called, turn, more_formats))


def _decode(picture: Picture, called: str, turn: ExitStack, more_formats: tuple[str, ...]) -> Image.Image:
    data = b""
    try:
        if isinstance(picture, Image.Image):
            with _in_memory[id(picture) // 16 % len(_in_memory)]:
                return _finish(picture, called, turn)
        with io.BytesIO(picture) if isinstance(picture, bytes) else open_regular(picture, links=True) as file:
            if (size := file.seek(0, io.SEEK_END)) > MOST_PICTURE:
                raise BombError(f"{size / 2**20:,.0f} MiB")
            file.seek(0)
            data = file.read()
        refuse_bombs(data)
        with Image.open(MeteredFile(data), formats=[*readable_formats(), *more_formats]) as image:
            return _finish(image, called, turn)
    except BombError as error:
        raise BrokenPictureError(f"{called} is too large to decode safely ({error}); make it smaller") from error
    except BrokenPictureError:
        raise
    except MissingFileError as error:
        raise BrokenPictureError(f"{called} does not exist; check its name") from error
    except Exception as error:  # a damaged file can raise anything, because its decoder trusts the header
        message = f"{called} is not a picture that can be read ({_short(error)}); replace or remove it"
        if data[4:8] == b"ftyp" and data[8:12] in HEIF_BRANDS and "HEIF" not in readable_formats():
            message = f"{called} is a HEIC picture, which needs an extra: pip install 'clipcil[heic]'"
        raise BrokenPictureError(message) from error


def _finish(image: Image.Image, called: str, turn: ExitStack) -> Image.Image:
    """An opened picture as upright RGB. Its limits are checked first, by the header alone."""
    if not image.width * image.height:
        raise BrokenPictureError(f"{called} has no pixels; replace or remove it")
    tags = getattr(image, "tag_v2", {})  # of a TIFF, whose tiles are decoded whole and may be larger than the picture
    pixels = max(image.width * image.height, tags.get(TILE_WIDTH, 0) * tags.get(TILE_HEIGHT, 0))
    if pixels > MOST_PIXELS or max(image.size) > MOST_ROWS:
        raise BombError(f"{pixels:,} pixels")
    if pixels > LARGE_PICTURE:
        turn.enter_context(_turn)
    image.load()
    with suppress(Exception):  # a damaged tag is no reason to refuse a whole picture
        image = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):
        image = _eight_bits(image)
    if image.mode == "La":  # PIL turns it into nothing else
        image = image.convert("LA")
    return _on_white(image) if image.has_transparency_data else image.convert("RGB")  # a palette can have it too


@cache
def readable_formats() -> list[str]:
    """Those of `FORMATS` that this build of PIL has, and HEIF by the extra `heic`."""
    Image.init()
    if find_spec("pillow_heif") is not None:
        import pillow_heif

        pillow_heif.register_heif_opener()
    return [name for name in FORMATS if name in Image.OPEN]


def _on_white(image: Image.Image) -> Image.Image:
    page = Image.new("RGB", image.size)
    for rows in _strips(image):
        part = image.crop((0, rows.start, image.width, rows.stop)).convert("RGBA")
        whole = Image.alpha_composite(Image.new("RGBA", part.size, "white"), part)
        page.paste(whole.convert("RGB"), (0, rows.start))
    return page


def _eight_bits(image: Image.Image) -> Image.Image:
    """Greys of 16 bits or floats, scaled to 0…255; PIL's own conversion would clip them to white.

    Mode I;16 always means 0…65535. Modes I and F do not say their range, so the smallest of 1 (floats only), 255 and
    65535 that holds the picture is taken.
    """
    raw, strips = np.asarray(image), _strips(image)

    def values(rows: slice) -> np.ndarray:
        return np.nan_to_num(raw[rows].astype(np.float64))

    top = 65535.0
    if not image.mode.startswith("I;16"):
        peak = max((float(values(rows).max(initial=0.0)) for rows in strips), default=0.0)
        top = next((t for t in ((1.0, 255.0) if image.mode == "F" else (255.0,)) if peak <= t), max(top, peak))
    grey = np.empty(raw.shape, dtype=np.uint8)
    for rows in strips:
        grey[rows] = np.clip(values(rows) * (255.0 / top), 0, 255).round()
    return Image.fromarray(grey, "L")


def _strips(image: Image.Image) -> list[slice]:
    """Rows of pieces of about `STRIP` pixels."""
    step = max(1, STRIP // max(1, image.width))
    return [slice(top, min(image.height, top + step)) for top in range(0, image.height, step)]


def _short(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, UnidentifiedImageError):
        return "its format is unknown"
    kind, text = type(error).__name__, first_line(error).split(" <_io")[0].split(" '")[0]
    return kind if text == kind else f"{kind}: {text}"[:120]


def thumbnail(image: Image.Image, side: int) -> bytes:
    """A small copy of an RGB picture as a JPEG file, its longest side at most `side` pixels."""
    small = image.copy()
    small.thumbnail((side, side))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=85)
    return out.getvalue()


def identity_of_pictures(pictures: Sequence[Picture]) -> str:
    """Fingerprint of a list of pictures: files by place, size and time of change, others by their contents."""
    digest = hashlib.sha256()
    for picture in pictures:
        if isinstance(picture, Path):
            digest.update(identity_of_files([picture]).encode())
        else:
            digest.update(hashlib.sha256(picture if isinstance(picture, bytes) else contents(picture)).digest())
    return digest.hexdigest()[:24]


def contents(image: Image.Image) -> bytes:
    """Bytes that are equal for pictures in memory that look alike to `decode`, and for no others.

    Of a picture that cannot be decoded only the header is used here: decoding it reports the error.
    """
    try:
        tags = {"palette": image.getpalette("RGBA"), "transparency": image.info.get("transparency")}
        tags["turned"] = image.getexif().get(ExifTags.Base.Orientation)
        shown = "".join(f" {name} {value}" for name, value in tags.items() if value is not None)
        return f"{image.mode}{image.size}{shown}".encode() + image.tobytes()
    except Exception as error:  # a damaged file can raise anything, because its decoder trusts the header
        return f"{image.mode}{image.size} cannot be read: {_short(error)}".encode()


def identity_of_files(paths: Sequence[Path], root: Path | None = None) -> str:
    """Fingerprint of a list of files by place, size and time of change; no file is read.

    The folder is part of it: reproducible archives give all files the same time, and two such folders must differ.
    """
    digest = hashlib.sha256()
    base = root.resolve() if root is not None else None
    digest.update(f"{base}\n".encode("utf-8", "surrogateescape"))
    for path in paths:
        where = path.relative_to(root).as_posix() if root is not None else str(path.absolute())
        try:
            status = path.stat()
            mark = f"{where}|{status.st_size}|{status.st_mtime_ns}\n"
        except OSError:  # deleted, or a broken link: reading it reports the error
            mark = f"{where}|missing\n"
        digest.update(mark.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:24]

"""The cache of pixels: preprocessed pictures on disk in half precision, a file for a set and a preprocessing.

A row is a checksum and the pixels of a picture. The checksum is compared at every read, so a damaged or half-written
row is computed again. Two processes may fill the same file: they write the same bytes to the same places.
"""

import math
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import PIL
import torch
from torch import Tensor

from clipcil.clip.preprocess import Preprocess
from clipcil.data.pictures import PictureSet, decoding_pool
from clipcil.errors import UserError

TRUNK_BATCH = 32
"""Pictures per pass through the preprocessing trunk. Always this many (the last chunk is filled up), so that a picture
has the same bits whatever the other pictures are."""
CHECKSUM = 4
"""Bytes of the checksum before each row."""


def pixels_key(preprocess: Preprocess) -> str:
    """The part of a cache key that names the preprocessing and the version of Pillow.

    Releases of Pillow update the libraries that decode JPEG, WebP and AVIF, whose pixels may then differ.
    """
    return f"{preprocess.fingerprint}-pillow{PIL.__version__}"


class PixelStore:
    """The preprocessed pictures of one set; made when first read, kept for the next run.

    The file is read and written by ordinary calls: a memory map would kill the process when the disk is full or the
    file is cut. It is never replaced, only extended (new bytes are zeros and take no room on the disk). A folder that
    cannot be written can still be read.
    """

    def __init__(self, pictures: PictureSet, preprocess: Preprocess, folder: Path | None) -> None:
        """Without a `folder` the file is temporary, until `close`."""
        self.preprocess = preprocess
        self._variable = "CLIPCIL_CACHE"
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if folder is None:
            self._variable, self._temporary = "TMPDIR", tempfile.TemporaryDirectory(prefix="clipcil-")
            folder = Path(self._temporary.name)
        self._path = folder / "pixels" / f"{pictures.identity}-{pixels_key(preprocess)}.rows"
        self._size = CHECKSUM + 2 * math.prod(preprocess.shape)
        with self._named_errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
                self._file = os.fdopen(handle, "rb+", buffering=0)
            except OSError:
                self._file = self._path.open("rb", buffering=0)
            size = len(pictures.pictures) * self._size
            if os.fstat(self._file.fileno()).st_size < size:
                os.truncate(self._file.fileno(), size)

    def read(self, pictures: PictureSet, rows: Tensor, on_progress: Callable[[int, int], None]) -> Tensor:
        """(B, C, H, W) float32: the pictures at `rows` of `pictures` (a subset of this store's set)."""
        places = pictures.rows[rows].tolist()
        wanted = dict.fromkeys(places)
        found = {place: row for place in wanted if (row := self._row(place)) is not None}
        if missing := sorted(set(wanted) - set(found)):
            found |= self._fill(pictures, missing, on_progress)
        return torch.from_numpy(np.stack([found[place] for place in places]).astype(np.float32))

    def close(self) -> None:
        """Delete the files of a store that has no folder of its own."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def _row(self, place: int) -> np.ndarray | None:
        """The picture at `place`, None where it was never written or is damaged."""
        with self._named_errors():
            row = os.pread(self._file.fileno(), self._size, place * self._size)
        if row[:CHECKSUM] != _checksum(row[CHECKSUM:]):
            return None
        return np.frombuffer(row, dtype=np.float16, offset=CHECKSUM).reshape(self.preprocess.shape)

    def _fill(
        self, pictures: PictureSet, places: list[int], on_progress: Callable[[int, int], None]
    ) -> dict[int, np.ndarray]:
        """Preprocess the pictures at `places` and keep them; returns them."""
        made: dict[int, np.ndarray] = {}

        def prepare(place: int) -> Tensor:
            return pictures.decode_and(place, self.preprocess.picture)

        chunks = [places[start : start + TRUNK_BATCH] for start in range(0, len(places), TRUNK_BATCH)]
        with decoding_pool() as pool:
            pictures_ahead = pool.map(prepare, places)  # the threads decode while the trunk works
            for number, chunk in enumerate(chunks, start=1):
                stacked = torch.stack([next(pictures_ahead) for _ in chunk])
                full = torch.cat([stacked, stacked.new_zeros(TRUNK_BATCH - len(chunk), *stacked.shape[1:])])
                with torch.no_grad():
                    ready = self.preprocess.finish(full)[: len(chunk)].to(torch.float16).numpy()
                for place, pixels in zip(chunk, ready, strict=True):
                    data = pixels.tobytes()
                    with self._named_errors():
                        if os.pwrite(self._file.fileno(), _checksum(data) + data, place * self._size) != self._size:
                            raise OSError("the disk is full")
                    made[place] = pixels
                on_progress(number, len(chunks))
        return made

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"the picture cache {self._path.parent} cannot be used ({error.strerror or error})"
            advice = f"free some room, or set {self._variable} to a folder that can be written"
            raise UserError(f"{what}; {advice}") from error


def _checksum(data: bytes) -> bytes:
    return (zlib.crc32(data) or 1).to_bytes(CHECKSUM, "little")  # 0 marks a row that was never written

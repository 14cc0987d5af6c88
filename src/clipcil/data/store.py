"""Preprocessed pictures on disk: half precision, one file per picture set and preprocessing.

A row is valid when its checksum in the index matches its bytes; this is checked at every read, so a damaged file
costs time and not accuracy. Two processes that fill the same file write the same bytes to the same places, so neither
can harm the other. A process killed in the middle of a row leaves a row whose checksum does not match; it is computed
again.
"""

from __future__ import annotations

import math
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import PIL
import torch
from torch import Tensor

from clipcil.clip.preprocess import Preprocess
from clipcil.data.pictures import PictureSet, decoded, decoding_pool
from clipcil.errors import UserError

CHUNK = 32
"""Pictures per pass through the preprocessing trunk. Always this many (the last chunk is filled up), so that a picture
has the same bits whatever the other pictures are."""


def pixels_key(preprocess: Preprocess) -> str:
    """What preprocessed pixels depend on beside the picture: the preprocessing, and the version of Pillow.

    Its releases update the libraries that decode JPEG, WebP and AVIF, whose pixels may then differ.
    """
    return f"{preprocess.fingerprint}-pillow{PIL.__version__}"


class PixelStore:
    """The preprocessed pictures of one set; made when first read, kept for the next run."""

    def __init__(self, pictures: PictureSet, preprocess: Preprocess, folder: Path | None) -> None:
        self.preprocess = preprocess
        count = len(pictures.pictures)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="clipcil-")
            folder = Path(self._temporary.name)
        stem = f"{pictures.identity}-{pixels_key(preprocess)}"
        self._shape = tuple(preprocess.shape)
        advice = _ADVICE if self._temporary is None else _TEMPORARY_ADVICE
        self._data = _Rows(folder / "pixels" / f"{stem}.f16", count, 2 * math.prod(self._shape), advice)
        self._sums = _Rows(folder / "pixels" / f"{stem}.crc", count, 4, advice)

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
        data = self._data.read(place)
        stored = int.from_bytes(self._sums.read(place), "little")
        if stored == 0 or _checksum(data) != stored:
            return None
        return np.frombuffer(data, dtype=np.float16).reshape(self._shape)

    def _fill(
        self, pictures: PictureSet, places: list[int], on_progress: Callable[[int, int], None]
    ) -> dict[int, np.ndarray]:
        """Preprocess the pictures at `places` and keep them; returns them."""
        made: dict[int, np.ndarray] = {}

        def decode(place: int) -> Tensor:
            with decoded(pictures.pictures[place], pictures.describe_place(place)) as image:
                return self.preprocess.picture(image)

        chunks = [places[start : start + CHUNK] for start in range(0, len(places), CHUNK)]
        with decoding_pool() as pool:
            # One chunk is decoded by the threads while the trunk works on the one before it.
            coming = [pool.submit(decode, place) for place in chunks[0]]
            for number, chunk in enumerate(chunks):
                stacked = torch.stack([future.result() for future in coming])
                after = chunks[number + 1] if number + 1 < len(chunks) else []
                coming = [pool.submit(decode, place) for place in after]
                full = torch.cat([stacked, stacked.new_zeros(CHUNK - len(chunk), *stacked.shape[1:])])
                with torch.no_grad():
                    ready = self.preprocess.finish(full)[: len(chunk)].to(torch.float16).numpy()
                for place, values in zip(chunk, ready, strict=True):
                    data = values.tobytes()
                    self._data.write(place, data)
                    self._sums.write(place, _checksum(data).to_bytes(4, "little"))
                    made[place] = values
                on_progress(number + 1, len(chunks))
        return made


def _checksum(data: bytes) -> int:
    return zlib.crc32(data) or 1  # 0 marks a row that was never written


class _Rows:
    """A file of equal rows, read and written by ordinary calls.

    A memory map would kill the process when the disk is full or the file is cut; these calls report it. The file is
    never replaced, only made as long as it has to be (new bytes are zeros and take no room): a second process that
    opens it at the same moment has the same file, not one that is about to vanish. In a folder that cannot be written,
    what is there can still be read.
    """

    def __init__(self, path: Path, count: int, size: int, advice: str) -> None:
        self.path, self._size, self._advice = path, size, advice
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open(path)
            if os.fstat(self._file.fileno()).st_size < count * size:
                os.truncate(self._file.fileno(), count * size)
        except OSError as error:
            raise self._cannot_use(error) from error

    def read(self, place: int) -> bytes:
        """The row at `place`; shorter where the file ends."""
        try:
            return os.pread(self._file.fileno(), self._size, place * self._size)
        except OSError as error:
            raise self._cannot_use(error) from error

    def write(self, place: int, data: bytes) -> None:
        try:
            if os.pwrite(self._file.fileno(), data, place * self._size) != self._size:
                raise OSError("the disk is full")
        except OSError as error:
            raise self._cannot_use(error) from error

    def _cannot_use(self, error: OSError) -> UserError:
        folder = self.path.parent
        return UserError(f"the picture cache {folder} cannot be used ({error.strerror or error}); {self._advice}")


def _open(path: Path) -> BinaryIO:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        return cast(BinaryIO, os.fdopen(handle, "rb+", buffering=0))
    except OSError:
        if not path.is_file():
            raise
        return cast(BinaryIO, path.open("rb", buffering=0))


_ADVICE = "free some room, or set CLIPCIL_CACHE to a folder that can be written"
_TEMPORARY_ADVICE = "free some room, or set TMPDIR to a folder that has some"

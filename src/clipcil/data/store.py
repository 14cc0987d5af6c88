"""Preprocessed pictures on disk: half precision, memory-mapped, one file per picture set and preprocessing.

A row is valid when its checksum in the index matches its bytes. Two processes that fill the same file write the same
bytes to the same places, so neither can harm the other, and a process killed in the middle of a row leaves a row whose
checksum does not match: it is made again.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from clipcil.clip.preprocess import Preprocess
from clipcil.data.pictures import PictureSet
from clipcil.errors import UserError

CHUNK = 32
"""Pictures per pass through the preprocessing trunk. Always this many (the last chunk is filled up), so that a picture
comes out with the same bits whatever stands beside it."""
THREADS = 4


class PixelStore:
    """The preprocessed pictures of one set; made when first read, kept for the next run."""

    def __init__(self, pictures: PictureSet, preprocess: Preprocess, folder: Path | None) -> None:
        self.preprocess = preprocess
        self.filled = 0
        count = len(pictures.pictures)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="clipcil-")
            folder = Path(self._temporary.name)
        stem = folder / "pixels" / f"{pictures.identity}-{preprocess.fingerprint}"
        shape = (count, *preprocess.shape)
        self._data = _Rows(stem.with_suffix(".f16"), np.dtype(np.float16), shape)
        self._sums = _Rows(stem.with_suffix(".crc"), np.dtype(np.uint32), (count,))
        self._checked = np.zeros(count, dtype=bool)

    def read(self, pictures: PictureSet, rows: Tensor, on_progress: Callable[[int, int], None]) -> Tensor:
        """(B, C, H, W) float32: the pictures at `rows` of `pictures` (a subset of this store's set)."""
        places = pictures.rows[rows].numpy()
        missing = [place for place in np.unique(places) if not self._valid(int(place))]
        if missing:
            self._fill(pictures, missing, on_progress)
        return torch.from_numpy(self._data.values[places].astype(np.float32))

    def close(self) -> None:
        """Delete the files of a store that has no folder of its own."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def _valid(self, place: int) -> bool:
        if not self._checked[place]:
            stored = int(self._sums.values[place])
            self._checked[place] = stored != 0 and _checksum(self._data.values[place]) == stored
        return bool(self._checked[place])

    def _fill(self, pictures: PictureSet, places: list[int], on_progress: Callable[[int, int], None]) -> None:
        whole = PictureSet(pictures.name, pictures.pictures, torch.zeros(len(pictures.pictures)), pictures.identity)

        def decode(place: int) -> Tensor:
            return self.preprocess.picture(whole.image(place))

        chunks = [places[start : start + CHUNK] for start in range(0, len(places), CHUNK)]
        with ThreadPoolExecutor(THREADS) as pool:
            # One chunk is decoded by the threads while the trunk works on the one before it.
            coming = [pool.submit(decode, place) for place in chunks[0]]
            for number, chunk in enumerate(chunks):
                decoded = torch.stack([future.result() for future in coming])
                after = chunks[number + 1] if number + 1 < len(chunks) else []
                coming = [pool.submit(decode, place) for place in after]
                full = torch.cat([decoded, decoded.new_zeros(CHUNK - len(chunk), *decoded.shape[1:])])
                with torch.no_grad():
                    ready = self.preprocess.finish(full)[: len(chunk)].to(torch.float16).numpy()
                for place, values in zip(chunk, ready, strict=True):
                    self._data.write(place, values)
                    self._sums.write(place, np.uint32(_checksum(values)))
                    self._checked[place] = True
                self.filled += len(chunk)
                on_progress(number + 1, len(chunks))


def _checksum(values: np.ndarray) -> int:
    return zlib.crc32(values.tobytes()) or 1  # 0 marks a row that was never written


class _Rows:
    """A file of equal rows: read through a memory map, written by ordinary writes to the same open file.

    A write through the map to a full disk would kill the process; an ordinary write reports it. The file is never
    replaced, only made as long as it has to be (new bytes are zeros and take no room): a second process that opens it
    at the same moment has the same file, not one that is about to vanish. In a folder that cannot be written, what is
    there can still be read.
    """

    def __init__(self, path: Path, kind: np.dtype, shape: tuple[int, ...]) -> None:
        self.path = path
        size = int(np.prod(shape)) * kind.itemsize
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open(path)
            if os.fstat(self._file.fileno()).st_size < size:
                os.truncate(self._file.fileno(), size)
            self.values = np.memmap(self._file, dtype=kind, mode="r", shape=shape)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{_cannot_use(path)} ({reason}); {_ADVICE}") from error

    def write(self, place: int, values: np.ndarray | np.generic) -> None:
        data = values.tobytes()
        try:
            if os.pwrite(self._file.fileno(), data, place * len(data)) != len(data):
                raise OSError("the disk is full")
        except OSError as error:
            raise UserError(f"{_cannot_use(self.path)} ({error.strerror or error}); {_ADVICE}") from error


def _open(path: Path) -> BinaryIO:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return cast(BinaryIO, os.fdopen(handle, "rb+", buffering=0))
    except OSError:
        if not path.is_file():
            raise
        return cast(BinaryIO, path.open("rb", buffering=0))


_ADVICE = "free some room, or set CLIPCIL_CACHE to a folder that can be written"


def _cannot_use(path: Path) -> str:
    return f"the picture cache {path.parent} cannot be used"

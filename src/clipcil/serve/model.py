"""The served model: changed on copies, one change at a time; asked in batches; packed into zip files."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import shutil
import threading
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastapi import HTTPException

from clipcil.classifier.classifier import Classifier
from clipcil.classifier.folder import CARD, MODEL, read_previous, restore_previous
from clipcil.classifier.load import load, load_or_new
from clipcil.classifier.predict import Prediction
from clipcil.classifier.small_pictures import SmallPictures
from clipcil.classifier.state import WEIGHTS, Facts
from clipcil.errors import UserError
from clipcil.serve.answers import Limits
from clipcil.serve.staging import Staging

MOST_CLASSES = 100
"""Classes named for one picture."""


class ServedModel:
    """The model in a folder whose lock the caller holds.

    Args:
        folder: Folder of the model; it need not exist.
        method: Method of a new model; None takes the default.
        backbone: Backbone to use instead of the one that the model names.
        device: Device of the model.
        staging: The waiting pictures, whose classes are renamed with those of the model.
    """

    def __init__(self, folder: Path, method: str | None, backbone: str | None, device: str, staging: Staging) -> None:
        self.folder, self.small = folder, SmallPictures(folder)
        self._method, self._backbone, self._device, self._staging = method, backbone, device, staging
        self._lock = threading.Lock()
        self.revision = 0
        """Number of changes since the start."""
        self.model = load_or_new(folder, method=method, backbone=backbone, device=device)

    def copy(self, folder: Path | None = None) -> Classifier:
        """Load the model from its folder, or from another one, which never chooses its own backbone."""
        if folder is not None:
            return load(folder, backbone=self._backbone or self.model.facts().backbone, device=self._device)
        method = None if self.model.classes else self._method  # an uploaded model may have another one
        return load_or_new(self.folder, method=method, backbone=self._backbone, device=self._device)

    @contextmanager
    def change(self, start: Path | None = None, keep_previous: bool = True) -> Iterator[Classifier]:
        """A copy of the model to change. If the block succeeds, the copy is written and answers from then on.

        Args:
            start: Folder of another model to start from.
            keep_previous: Keep the previous model for `undo`; otherwise nothing of it is left.
        """
        with self._changing():
            model = self.copy(start)
            yield model
            model.write(self.folder, keep_previous=keep_previous)
            self.model = model

    def undo(self) -> None:
        """Restore the model before the last change; the current one is kept in its place."""
        with self._changing():
            if self.previous() is None:
                raise HTTPException(409, "no earlier model is kept; there is nothing to undo")
            restore_previous(self.folder)
            self.model = self.copy()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """One change at a time; small and waiting pictures follow it."""
        if not self._lock.acquire(blocking=False):
            raise HTTPException(409, "the model is being changed; wait for the lesson, or cancel it")
        before = self.model.class_facts
        try:
            yield
            self.small.follow(before)
        finally:
            self._staging.follow(before, self.model.class_facts)
            self.revision += 1
            self._lock.release()

    def previous(self) -> Facts | None:
        """The model before the last change, if it is kept and undamaged."""
        try:
            return read_previous(self.folder)
        except UserError:
            return None

    def need(self) -> Classifier:
        """The current model, which must have learnt something."""
        if not self.model.classes:
            raise HTTPException(409, "the model has learnt nothing yet; teach it first")
        return self.model


class Predictor:
    """A bounded queue in front of the model.

    Pictures of all clients that arrive while one batch is scored form the next batch; no client waits for a batch to
    fill up.
    """

    def __init__(self, served: ServedModel, limits: Limits) -> None:
        self._served, self._limits = served, limits
        self._waiting: asyncio.Queue[tuple[bytes, asyncio.Future[Prediction]]] = asyncio.Queue(limits.queued_pictures)

    async def predict(self, pictures: list[bytes]) -> list[Prediction]:
        """The prediction for each picture, in order."""
        if self._waiting.qsize() + len(pictures) > self._waiting.maxsize:
            raise HTTPException(503, "too many pictures are waiting; try again in a moment", {"Retry-After": "1"})
        found: list[asyncio.Future[Prediction]] = [asyncio.get_running_loop().create_future() for _ in pictures]
        for picture, answer in zip(pictures, found, strict=True):
            try:
                self._limits.check(picture)
                self._waiting.put_nowait((picture, answer))
            except UserError as error:
                answer.set_result(Prediction([], [], error=str(error)))
        return await asyncio.gather(*found)

    async def run(self) -> None:
        """Score batch after batch until cancelled."""
        while True:
            jobs = [await self._waiting.get()]
            while not self._waiting.empty() and len(jobs) < self._limits.batch:
                jobs.append(self._waiting.get_nowait())
            try:
                found = await asyncio.to_thread(self._score, [picture for picture, _ in jobs])
            except Exception as error:
                for _, answer in jobs:
                    if not answer.done():  # as that of a client that left
                        answer.set_exception(error)
            else:
                for (_, answer), prediction in zip(jobs, found, strict=True):
                    if not answer.done():
                        answer.set_result(prediction)

    def _score(self, pictures: list[bytes]) -> list[Prediction]:
        return [found for _, found in self._served.need().predict_stream(pictures, MOST_CLASSES)]


def pack(folder: Path, into: Path) -> Path:
    """Pack the files of `folder` into the zip file `into`."""
    # Without strict timestamps, because a machine without a clock gives files times before 1980, which zip lacks.
    with zipfile.ZipFile(into, "w", zipfile.ZIP_STORED, strict_timestamps=False) as packed:
        for path in sorted(folder.glob("[!.]*")):
            packed.write(path, path.name)
    return into


def unpack_model(archive: Path, folder: Path, most: int) -> None:
    """Unpack an uploaded model into the new folder `folder`: only files of a model, at most `most` bytes.

    Raises:
        UserError: `archive` is not a zip file of a model.
    """
    folder.mkdir(mode=0o700)
    try:
        with _InPieces(archive) as file, zipfile.ZipFile(file) as packed:
            entries = [entry for entry in packed.infolist() if not entry.is_dir()]
            names = [entry.filename for entry in entries]
            others = [name for name in names if name not in (MODEL, CARD) and not WEIGHTS.fullmatch(name)]
            if others or len(set(names)) != len(names) or MODEL not in names or len(names) > 3:
                raise UserError(f"the zip file must hold {MODEL}, {CARD} and one file of weights, and nothing else")
            if sum(entry.file_size for entry in entries) > most:
                raise UserError("the zip file unpacks to more bytes than a model may have")
            for entry in entries:
                if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise zipfile.BadZipFile("other kinds are unpacked in one piece: 500 bytes made 400 MB")
                with packed.open(entry) as source, (folder / entry.filename).open("wb") as target:
                    shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, IndexError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a place before the start of the file
            raise
        raise UserError(f"not a zip file of a model ({type(error).__name__}); upload one downloaded here") from error


class _InPieces(io.FileIO):
    """A file that refuses to read more than a megabyte at once.

    `zipfile` reads a zip file's directory in one piece; a directory of a gigabyte takes several times that in memory.
    """

    def read(self, size: int | None = -1) -> bytes:
        left = os.fstat(self.fileno()).st_size - self.tell()
        if (left if size is None or size < 0 else min(left, size)) > 2**20:
            raise zipfile.BadZipFile("the directory is too large")
        return super().read(size) or b""

"""The served model: changed on copies, one change at a time, and asked in batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import HTTPException

from clipcil.classifier.classifier import Classifier, load
from clipcil.classifier.facts import Facts
from clipcil.classifier.model_folder import MODEL, read_previous, restore_previous
from clipcil.classifier.predicting import Prediction
from clipcil.errors import UserError
from clipcil.serve.guard import Limits

DEFAULT_BACKBONE = "mini"


class Keeper:
    """Holds the current model of a folder. The caller holds the folder's lock.

    Args:
        folder: Folder of the model; it need not exist.
        method: Method of a new model; None takes the default.
        backbone: Backbone to use instead of the one that the model names.
        device: Device of the model.
    """

    def __init__(self, folder: Path, method: str | None, backbone: str | None, device: str) -> None:
        self.folder, self._backbone, self._device = folder, backbone, device
        self._changing = threading.Lock()
        self.model: Classifier | None = None
        self.revision = 0
        """Number of changes since the start."""
        self._choices: dict[str, Any] = {} if method is None else {"method": method}
        if not (folder / MODEL).exists():
            self._new()  # reports a wrong method or backbone now, not at the first lesson
            return
        self.model = self.copy()
        found = self.model.facts().method
        if method not in (None, found):
            raise UserError(f"{folder} has method '{found}', not '{method}'; leave --method out")

    @property
    def backbone(self) -> str:
        """The backbone that models of this server use."""
        return self._backbone or (self.model.facts().backbone if self.model else DEFAULT_BACKBONE)

    def copy(self, folder: Path | None = None) -> Classifier:
        """Load the model from disk, or the one in another folder, which never chooses its own backbone."""
        backbone = self._backbone if folder is None else self.backbone
        return load(folder or self.folder, backbone=backbone, device=self._device)

    @contextmanager
    def changing(self, start: Path | None = None, keep_previous: bool = True) -> Iterator[Classifier]:
        """A copy of the model to change. If the block succeeds, the copy is written and answers from then on.

        Args:
            start: Folder of another model to start from.
            keep_previous: Keep the previous model for `undo`; otherwise nothing of it is left.

        Raises:
            HTTPException: 409 during another change.
        """
        with self._alone():
            model = self._new() if start is None and self.model is None else self.copy(start)
            yield model
            model.write(self.folder, keep_previous=keep_previous)
            self.model, self.revision = model, self.revision + 1

    def undo(self) -> None:
        """Restore the model before the last change; the current one is kept in its place.

        Raises:
            HTTPException: 409 if none is kept, or during a change.
        """
        with self._alone():
            if self.previous() is None:
                raise HTTPException(409, "no earlier model is kept; there is nothing to undo")
            restore_previous(self.folder)
            self.model, self.revision = self.copy(), self.revision + 1

    def previous(self) -> Facts | None:
        """The model before the last change, if it is kept and undamaged."""
        try:
            return read_previous(self.folder)
        except UserError:
            return None

    def need(self) -> Classifier:
        """The current model.

        Raises:
            HTTPException: 409 before the first lesson.
        """
        if self.model is None:
            raise HTTPException(409, "the model has learnt nothing yet; teach it first")
        return self.model

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._changing.acquire(blocking=False):
            raise HTTPException(409, "the model is being changed; wait for the lesson, or cancel it")
        try:
            yield
        finally:
            self._changing.release()

    def _new(self) -> Classifier:
        return Classifier(backbone=self.backbone, device=self._device, **self._choices)


@dataclass
class _Job:
    """The pictures of one request."""

    pictures: list[bytes]
    top: int
    answer: asyncio.Future[list[Prediction]]


class Predictor:
    """A bounded queue in front of the model.

    Requests of all clients that arrive while one batch is scored form the next batch; no client waits for a batch to
    fill up.
    """

    def __init__(self, keeper: Keeper, limits: Limits) -> None:
        self._keeper, self._limits = keeper, limits
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._queued = 0
        self.closed = False
        """Set when the server is asked to stop: waiting pictures are then refused, so that the server can end."""

    async def predict(self, pictures: list[bytes], top: int) -> list[Prediction]:
        """The prediction for each picture, in order.

        Raises:
            HTTPException: 503 if the queue is full.
        """
        if self._queued + len(pictures) > self._limits.queued_pictures:
            raise HTTPException(503, "too many pictures are waiting; try again in a moment", {"Retry-After": "1"})
        self._queued += len(pictures)
        job = _Job(pictures, top, asyncio.get_running_loop().create_future())
        self._jobs.put_nowait(job)
        return await job.answer

    async def run(self) -> None:
        """Score batch after batch until cancelled."""
        while True:
            jobs = [await self._jobs.get()]
            while not self._jobs.empty() and sum(len(job.pictures) for job in jobs) < self._limits.batch:
                jobs.append(self._jobs.get_nowait())
            self._queued -= sum(len(job.pictures) for job in jobs)
            jobs = [job for job in jobs if not job.answer.done()]  # without those of clients that left
            try:
                found = iter(await asyncio.to_thread(self._score, jobs))
            except Exception as error:
                for job in jobs:
                    if not job.answer.done():
                        job.answer.set_exception(error)
                continue
            for job in jobs:
                rows = [next(found) for _ in job.pictures]
                if not job.answer.done():
                    job.answer.set_result([_best(row, job.top) for row in rows])

    def _score(self, jobs: list[_Job]) -> list[Prediction]:
        """The predictions of all pictures of these jobs, in order."""
        if self.closed:
            raise HTTPException(503, "the server is being stopped")
        pictures = [picture for job in jobs for picture in job.pictures]
        errors = [self._limits.refusal(picture) for picture in pictures]
        good = [picture for picture, error in zip(pictures, errors, strict=True) if error is None]
        scored = self._keeper.need().predict_stream(good, max((job.top for job in jobs), default=1))
        return [next(scored)[1] if error is None else Prediction([], [], error=error) for error in errors]


def _best(row: Prediction, top: int) -> Prediction:
    return replace(row, names=row.names[:top], probabilities=row.probabilities[:top])

"""Predictions of all clients together: what arrives while one batch is scored makes up the next one.

No client waits for others to come: a batch starts as soon as the one before it is done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from starlette.exceptions import HTTPException

from clipcil.classifier.classifier import Classifier
from clipcil.classifier.predicting import Prediction
from clipcil.errors import UserError
from clipcil.serve.limits import Limits
from clipcil.serve.staging import refuse_huge


@dataclass(eq=False)
class _Job:
    picture: bytes
    top: int
    answer: asyncio.Future[Prediction]


class Predictor:
    """A bounded queue in front of the model."""

    def __init__(self, model: Callable[[], Classifier | None], limits: Limits) -> None:
        self._model, self._limits = model, limits
        self._queue: deque[_Job] = deque()
        self._wake = asyncio.Event()
        self.closed = False
        """Set when the server is asked to stop: waiting pictures are then refused, so that the server can end."""

    async def predict(self, pictures: list[bytes], top: int) -> list[Prediction]:
        """The prediction for each picture, in their order.

        Raises:
            HTTPException: 503 if the queue is full.
        """
        if len(self._queue) + len(pictures) > self._limits.queued_pictures:
            raise HTTPException(503, "too many pictures are waiting; try again in a moment", {"Retry-After": "1"})
        loop = asyncio.get_running_loop()
        jobs = [_Job(picture, top, loop.create_future()) for picture in pictures]
        self._queue.extend(jobs)
        self._wake.set()
        try:
            return [await job.answer for job in jobs]
        finally:
            for job in jobs:
                job.answer.cancel()  # a client that went away is not waited for

    async def run(self) -> None:
        """Score batch after batch until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                count = min(self._limits.batch, len(self._queue))
                jobs = [job for job in (self._queue.popleft() for _ in range(count)) if not job.answer.cancelled()]
                if self.closed:
                    for job in jobs:
                        job.answer.set_exception(HTTPException(503, "the server is being stopped"))
                elif jobs:
                    await self._answer(jobs)

    async def _answer(self, jobs: list[_Job]) -> None:
        try:
            found = await asyncio.to_thread(self._score, jobs)
        except Exception as error:
            for job in jobs:
                if not job.answer.done():
                    job.answer.set_exception(error)
            return
        for job, prediction in zip(jobs, found, strict=True):
            if not job.answer.done():
                job.answer.set_result(prediction)

    def _score(self, jobs: list[_Job]) -> list[Prediction]:
        model = self._model()
        if model is None:
            raise HTTPException(409, "the model has learnt nothing yet; teach it first")
        found: dict[_Job, Prediction] = {}
        for job in jobs:
            try:
                refuse_huge(job.picture, self._limits.pixels)
            except UserError as error:
                found[job] = Prediction([], [], error=str(error))
        whole = [job for job in jobs if job not in found]
        if whole:
            most = max(job.top for job in whole)
            scored = model.predict_stream([job.picture for job in whole], most)
            for job, (_, each) in zip(whole, scored, strict=True):
                shown = each.names[: job.top], each.probabilities[: job.top]
                found[job] = Prediction(*shown, each.unknown, each.error)
        return [found[job] for job in jobs]

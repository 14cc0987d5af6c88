"""The served model: changed on copies, one change at a time; taught in lessons; asked in batches."""

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import HTTPException

from clipcil.classifier.classifier import Classifier
from clipcil.classifier.folder import PREVIOUS, read_model, restore_previous
from clipcil.classifier.lesson import LessonStoppedError
from clipcil.classifier.load import load, load_or_new
from clipcil.classifier.predict import Prediction
from clipcil.classifier.small_pictures import MOST_SMALL_PICTURES, SmallPictures
from clipcil.classifier.state import Facts
from clipcil.errors import UserError
from clipcil.serve.answers import LessonResult, LessonState, Limits, accuracy, explain
from clipcil.serve.staging import StagedPicture, Staging, by_class, discard
from clipcil.training.cpu import return_freed_memory

MOST_CLASSES = 100
"""Classes named for one picture."""
MOST_PAIRS = 20
"""Confused pairs of classes in the result of a lesson, the most frequent first."""


class ServedModel:
    """The model in a folder whose lock the caller holds. `method` is that of a new model; `staging` follows renames."""

    def __init__(self, folder: Path, method: str | None, backbone: str | None, device: str, staging: Staging) -> None:
        self.folder, self.small = folder, SmallPictures(folder)
        self._method, self._backbone, self._device, self._staging = method, backbone, device, staging
        self._lock = threading.Lock()
        self.revision = 0
        """Number of changes since the start."""
        self.lesson: str | None = None
        """Id of the lesson that made the model what it is."""
        self.keep_small = self.small.on
        """Whether small pictures are kept, from the next lesson on."""
        self.model = load_or_new(folder, method=method, backbone=backbone, device=device)

    def copy(self) -> Classifier:
        """The model, loaded from its folder once more."""
        method = None if self.model.classes else self._method  # an uploaded model may have another one
        return load_or_new(self.folder, method=method, backbone=self._backbone, device=self._device)

    @contextmanager
    def change(self, start: Path | None = None) -> Iterator[Classifier]:
        """A copy of the model, or of the one in the folder `start`, to change. If the block succeeds, the copy is
        written and answers from then on, and `undo` restores the model before it."""
        with self._changing():
            if start is None:
                model = self.copy()
            else:  # an uploaded model never chooses the backbone that is loaded
                model = load(start, backbone=self._backbone or self.model.facts().backbone, device=self._device)
            yield model
            model.write(self.folder, keep_previous=True)
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
            self.lesson = None
            self._lock.release()

    def previous(self) -> Facts | None:
        """The model before the last change, if it is kept and undamaged."""
        try:
            return read_model(self.folder, PREVIOUS)
        except UserError:
            return None

    def need(self) -> Classifier:
        """The current model, which must have learnt something."""
        if not self.model.classes:
            raise HTTPException(409, "the model has learnt nothing yet; teach it first")
        return self.model


class Predictor:
    """Predictions in batches: pictures that arrive while a batch is scored form the next one, so nobody waits for a
    batch to fill up."""

    def __init__(self, served: ServedModel, limits: Limits) -> None:
        self._served, self._limits = served, limits
        self._waiting = deque[tuple[bytes, "asyncio.Future[Prediction]"]]()
        self._turn = asyncio.Lock()

    async def predict(self, pictures: list[bytes]) -> list[Prediction]:
        """The prediction for each picture, in order."""
        if len(self._waiting) + len(pictures) > self._limits.queued_pictures:
            raise HTTPException(503, "too many pictures are waiting; try again in a moment", {"Retry-After": "1"})
        answers: list[asyncio.Future[Prediction]] = [asyncio.get_running_loop().create_future() for _ in pictures]
        for picture, answer in zip(pictures, answers, strict=True):
            try:
                self._limits.check(picture)
                self._waiting.append((picture, answer))
            except UserError as error:
                answer.set_result(Prediction([], [], error=str(error)))
        for answer in answers:
            async with self._turn:
                if not answer.done():
                    await self._score_batch()
        return await asyncio.gather(*answers)

    async def _score_batch(self) -> None:
        """Answer the pictures that have waited longest."""
        jobs = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._limits.batch))]
        try:
            scored = self._served.need().predict_stream((picture for picture, _ in jobs), MOST_CLASSES)
            found = await asyncio.to_thread(lambda: [prediction for _, prediction in scored])
        except Exception as error:
            for _, answer in jobs:
                answer.set_exception(error)
        else:
            for (_, answer), prediction in zip(jobs, found, strict=True):
                answer.set_result(prediction)


class Lessons:
    """Teaches all waiting pictures, one lesson at a time."""

    def __init__(self, served: ServedModel, staging: Staging) -> None:
        self._served, self._staging = served, staging
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self.state: LessonState | None = None
        """The current or the last lesson; None before the first."""

    @property
    def running(self) -> bool:
        """Whether a lesson is in progress."""
        return self.state is not None and self.state.state == "running"

    def start(self) -> LessonState:
        """Begin to teach all waiting pictures. Called on the event loop, so one lesson at a time begins."""
        if self.running:
            raise HTTPException(409, "a lesson is under way; wait for it, or cancel it")
        taken = self._staging.take()
        if not taken:
            raise HTTPException(409, "no picture is waiting; add some to a class first")
        self._stop.clear()
        classes = by_class(item for item in taken if item.broken is None)
        self.state = LessonState(id=secrets.token_hex(6), classes={name: len(items) for name, items in classes.items()})
        self._thread = threading.Thread(target=self._run, args=(taken,), name="lesson", daemon=True)
        self._thread.start()
        return self.state

    def cancel(self) -> LessonState:
        """Ask the lesson to stop; the model stays as it was."""
        if self.state is None or not self.running:
            raise HTTPException(409, "no lesson is under way")
        self._stop.set()
        return self.state

    def close(self) -> None:
        """Stop the lesson, if there is one, and wait for its thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, taken: list[StagedPicture]) -> None:
        try:
            result = self._teach(taken)
        except BaseException as error:
            self._staging.put_back(taken)
            if isinstance(error, LessonStoppedError):
                self._tell(state="cancelled")
            else:
                self._tell(state="failed", error=_with_titles([explain(error)[1]], taken)[0])
            if not isinstance(error, (UserError, HTTPException)):
                raise
        else:
            discard(taken)
            self._served.lesson = self.state.id if self.state else None
            self._tell(state="done", result=result)
        finally:
            self._served.revision += 1  # it has other small pictures
            return_freed_memory()

    def _teach(self, taken: list[StagedPicture]) -> LessonResult:
        classes, before = by_class(item for item in taken if item.broken is None), self._served.model
        source = {name: [item.file for item in items] for name, items in classes.items()}
        try:
            with self._served.change() as model:
                lesson = model.learn(source, on_progress=self._progress, should_stop=self._stop.is_set)
                self._tell(stage="saving", done=0, total=0, seconds_left=None)
            if self._served.keep_small:
                self._served.small.switch(True)
            for name, items in classes.items():
                self._served.small.add(name, [item.thumbnail.read_bytes() for item in items[-MOST_SMALL_PICTURES:]])
        except (UserError, OSError) as error:
            if self._served.model is before:
                raise
            # The model is written, so the lesson has succeeded.
            lesson.warnings.append(f"no small pictures are kept of this lesson: {error}")
        broken = [f"{item.title}: {item.broken}" for item in taken if item.broken is not None]
        found, known = lesson.evaluation, len(self._served.model.classes)
        return LessonResult(
            new=lesson.new,
            again=lesson.again,
            unreadable=broken + _with_titles(lesson.unreadable, taken),
            repeated=len(lesson.repeated),
            held_out=found.pictures,
            left_one_out=lesson.left_one_out,
            accuracy=accuracy(found.right, found.pictures, known),
            accuracy_if_forced=accuracy(found.right_if_forced, found.pictures, known),
            interval=list(found.interval),
            confused=found.confused[:MOST_PAIRS],
            warnings=_with_titles(lesson.warnings, taken),
        )

    def _progress(self, stage: str, done: int, total: int) -> None:
        """Tell the progress of the lesson, with the time left in this stage."""
        now = time.monotonic()
        if self.state is None or stage != self.state.stage:
            self._began = now
        left = (now - self._began) / done * (total - done) if done else None
        self._tell(stage=stage, done=done, total=total, seconds_left=left)

    def _tell(self, **news: Any) -> None:
        if self.state is not None:
            self.state = self.state.model_copy(update=news)


def _with_titles(lines: list[str], taken: list[StagedPicture]) -> list[str]:
    """The lines with titles of pictures in place of their paths in the staging folder, which are private."""
    for item in taken:
        lines = [line.replace(str(item.file), item.title or "a picture") for line in lines]
    return lines

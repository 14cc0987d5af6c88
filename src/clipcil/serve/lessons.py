"""The current lesson, which runs in its own thread."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from typing import Any

from fastapi import HTTPException

from clipcil.classifier.lesson import LessonStoppedError
from clipcil.classifier.small_pictures import MOST
from clipcil.errors import UserError
from clipcil.serve.answers import LessonResult, LessonState, accuracy, explain
from clipcil.serve.model import ServedModel
from clipcil.serve.staging import Staging, Waiting, by_class, discard

MOST_PAIRS = 20
"""Confused pairs of classes in the result of a lesson, the most frequent first."""


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
        classes = Counter(item.name for item in taken if item.broken is None)
        self.state = LessonState(id=secrets.token_hex(6), classes=classes)
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

    def _run(self, taken: list[Waiting]) -> None:
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
            self._tell(state="done", result=result)
        finally:
            self._served.revision += 1  # it has other small pictures

    def _teach(self, taken: list[Waiting]) -> LessonResult:
        classes = by_class(item for item in taken if item.broken is None)
        source = {name: [item.file for item in items] for name, items in classes.items()}
        before = self._served.model
        try:
            with self._served.change() as model:
                lesson = model.learn(source, on_progress=self._progress, should_stop=self._stop.is_set)
                self._tell(stage="saving", done=0, total=0, seconds_left=None)
            for name, items in classes.items():
                self._served.small.add(name, [item.thumbnail.read_bytes() for item in items[-MOST:]])
        except (UserError, OSError) as error:
            if self._served.model is before:
                raise
            # The model is written, so the lesson has succeeded.
            lesson.warnings.append(f"no small pictures are kept of this lesson: {error}")
        broken = [f"{item.title}: {item.broken}" for item in taken if item.broken is not None]
        found = lesson.evaluation
        return LessonResult(
            new=lesson.new,
            again=lesson.again,
            unreadable=broken + _with_titles(lesson.unreadable, taken),
            repeated=len(lesson.repeated),
            held_out=found.pictures,
            left_one_out=lesson.left_one_out,
            accuracy=accuracy(found.right, found.pictures, len(self._served.model.classes)),
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


def _with_titles(lines: list[str], taken: list[Waiting]) -> list[str]:
    """The lines with titles of pictures in place of their paths in the staging folder, which are private."""
    for item in taken:
        lines = [line.replace(str(item.file), item.title or "a picture") for line in lines]
    return lines

"""The current lesson, which runs in its own thread, and the events that tell every open page about it."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from fastapi import HTTPException

from clipcil.classifier.lesson import LessonStoppedError
from clipcil.classifier.small_pictures import MOST, SmallPictures
from clipcil.errors import UserError, printable
from clipcil.serve.answers import LessonResult, LessonState
from clipcil.serve.model import Keeper
from clipcil.serve.staging import Staging, Waiting, by_class

ALIVE_SECONDS = 15.0
"""Seconds of silence after which a comment is sent, so that a lost connection is noticed."""
BETWEEN_SECONDS = 0.2
"""Minimum seconds between two progress events."""


class Hub:
    """Sends events from any thread to the listeners on the event loop.

    Only the newest event of each kind is kept, so that a slow listener costs no memory.
    """

    def __init__(self) -> None:
        self.listeners, self.closed = 0, False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._count, self._news = 0, asyncio.Event()
        # A page that reconnects after a crash receives null and knows that its lesson was lost.
        self._newest = {"lesson": (0, "null")}

    def open(self) -> None:
        """Bind the hub to the running event loop."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """End the streams of all listeners."""
        self.closed = True
        self.publish()

    def publish(self, **events: Any) -> None:
        """Send a JSON value for each kind of event."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._spread, events)

    def _spread(self, events: dict[str, Any]) -> None:
        self._count += 1
        self._newest |= {kind: (self._count, json.dumps(each, ensure_ascii=False)) for kind, each in events.items()}
        self._news.set()
        self._news = asyncio.Event()

    async def listen(self) -> AsyncIterator[str]:
        """Server-sent events as text, beginning with the newest of each kind."""
        seen, self.listeners = -1, self.listeners + 1
        try:
            while not self.closed:
                news, unread = self._news, [(k, text) for k, (number, text) in self._newest.items() if number > seen]
                seen = self._count
                for kind, text in unread:
                    yield f"event: {kind}\ndata: {text}\n\n"
                try:
                    await asyncio.wait_for(news.wait(), ALIVE_SECONDS)
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            self.listeners -= 1


class Lessons:
    """Teaches all waiting pictures, one lesson at a time."""

    def __init__(self, keeper: Keeper, staging: Staging, small: SmallPictures, hub: Hub) -> None:
        self._keeper, self._staging, self._small, self._hub = keeper, staging, small, hub
        self._starting, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._stage, self._began, self._told = "", 0.0, 0.0
        self.state: LessonState | None = None
        """The current or the last lesson; None before the first."""

    @property
    def running(self) -> bool:
        """Whether a lesson is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> LessonState:
        """Begin to teach all waiting pictures.

        Raises:
            HTTPException: 409 if a lesson is in progress or no picture waits.
        """
        with self._starting:
            if self.running:
                raise HTTPException(409, "a lesson is under way; wait for it, or cancel it")
            taken = self._staging.take()
            if not taken:
                raise HTTPException(409, "no picture is waiting; add some to a class first")
            self._stop.clear()
            self._stage = ""
            classes = Counter(item.name for item in taken if item.broken is None)
            self.state = state = LessonState(id=secrets.token_hex(6), classes=classes)
            self._tell()
            self._thread = threading.Thread(target=self._run, args=(taken,), name="lesson", daemon=True)
            self._thread.start()
            return state

    def cancel(self) -> LessonState:
        """Ask the lesson to stop; the model stays as it was.

        Raises:
            HTTPException: 409 if there is none.
        """
        if not self.running or self.state is None:
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
            elif isinstance(error, (UserError, HTTPException)):
                line = self._with_titles([str(getattr(error, "detail", error))], taken)[0]
                self._tell(state="failed", error=printable(line))  # the line may name a folder that is not UTF-8
            else:
                line = f"unexpected error ({type(error).__name__}); the terminal has the details"
                self._tell(state="failed", error=line)
                raise
        else:
            self._staging.discard(taken)
            self._tell(state="done", result=result)
        finally:
            self._hub.publish(model={}, waiting={})

    def _teach(self, taken: list[Waiting]) -> LessonResult:
        classes = by_class(item for item in taken if item.broken is None)
        source = {name: [self._staging.file(item.id) for item in items] for name, items in classes.items()}
        before = self._keeper.model.class_facts if self._keeper.model is not None else []
        with self._keeper.changing() as model:
            lesson = model.learn(source, on_progress=self._progress, should_stop=self._stop.is_set)
            self._tell(stage="saving", done=0, total=0, seconds_left=None)
        if self._small.on:
            try:
                self._small.follow(before)  # deletes those of a lesson that was undone
                for name, items in classes.items():
                    self._small.add(name, [self._staging.thumbnail(item.id).read_bytes() for item in items[-MOST:]])
            except (UserError, OSError) as error:  # the model is written, so the lesson has succeeded
                lesson.warnings.append(f"no small pictures are kept of this lesson: {error}")
        for lines in (lesson.warnings, lesson.unreadable):
            lines[:] = self._with_titles(lines, taken)
        broken = [f"{item.title}: {item.broken}" for item in taken if item.broken is not None]
        return LessonResult.of(lesson, broken, len(model.classes))

    def _with_titles(self, lines: list[str], taken: list[Waiting]) -> list[str]:
        """The lines with titles of pictures in place of their paths in the staging folder, which are private."""
        titles = {item.id: item.title for item in taken}
        path = re.compile(re.escape(f"{self._staging.folder}/") + r"([0-9a-f]+)\.picture")
        return [path.sub(lambda found: titles.get(found[1]) or "a picture", line) for line in lines]

    def _progress(self, stage: str, done: int, total: int) -> None:
        """Pass on the progress of the lesson at a limited rate, with the time left."""
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._told = stage, now, 0.0
        if now - self._told >= BETWEEN_SECONDS:
            self._told = now
            left = (now - self._began) / done * (total - done) if done else None
            self._tell(stage=stage, done=done, total=total, seconds_left=left)

    def _tell(self, **news: Any) -> None:
        if self.state is not None:
            self.state = self.state.model_copy(update=news)
            self._hub.publish(lesson=self.state.model_dump())

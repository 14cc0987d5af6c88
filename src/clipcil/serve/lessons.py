"""The current lesson: it runs in its own thread, reports progress and can be stopped."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException

from clipcil.classifier.lesson import Lesson, LessonStoppedError
from clipcil.classifier.small_pictures import MOST, SmallPictures
from clipcil.errors import UserError, printable
from clipcil.serve.events import Hub
from clipcil.serve.keeper import Keeper
from clipcil.serve.staging import Staging, Waiting

BETWEEN_SECONDS = 0.2
"""Minimum seconds between two progress events."""
CONFUSED = 20
"""Maximum number of confused pairs reported, the most frequent first."""


class Lessons:
    """Teaches what is waiting, one lesson at a time."""

    def __init__(self, keeper: Keeper, staging: Staging, small: SmallPictures, hub: Hub) -> None:
        self._keeper, self._staging, self._small, self._hub = keeper, staging, small, hub
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.state: dict[str, Any] | None = None
        """The lesson under way or the last one; None before the first."""

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> dict[str, Any]:
        """Begin to teach all that is waiting.

        Raises:
            HTTPException: 409 if a lesson is under way or nothing is waiting.
        """
        with self._starting:
            if self.running:
                raise HTTPException(409, "a lesson is under way; wait for it, or cancel it")
            taken = self._staging.take()
            if not taken:
                raise HTTPException(409, "no picture is waiting; add some to a class first")
            self._stop.clear()
            state = {"id": secrets.token_hex(6), "state": "running", "stage": "starting", "done": 0, "total": 0}
            classes = Counter(item.name for item in taken if item.broken is None)
            self.state = state | {"seconds_left": None, "classes": classes, "error": None, "result": None}
            self._thread = threading.Thread(target=self._run, args=(taken,), name="lesson", daemon=True)
            self._thread.start()
            return self.state

    def cancel(self) -> dict[str, Any]:
        """Ask the lesson to stop; the model stays as it was.

        Raises:
            HTTPException: 409 if there is none.
        """
        if not self.running or self.state is None:
            raise HTTPException(409, "no lesson is under way")
        self._stop.set()
        return self.state

    def close(self) -> None:
        """Stop the lesson, if there is one, and wait until its thread is done."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, taken: list[Waiting]) -> None:
        try:
            result = self._teach(taken)
        except LessonStoppedError:
            self._staging.put_back(taken)
            self._tell(state="cancelled")
        except (UserError, HTTPException) as error:
            self._staging.put_back(taken)
            said = self._with_titles([str(getattr(error, "detail", error))], taken)[0]
            self._tell(state="failed", error=printable(said))  # it may name a folder that is not UTF-8
        except BaseException as error:
            self._staging.put_back(taken)
            self._tell(state="failed", error=f"unexpected error ({type(error).__name__}); the terminal has the details")
            raise
        else:
            self._staging.discard(taken)
            self._tell(state="done", result=result)
        finally:
            self._hub.publish("model", {})
            self._hub.publish("waiting", {})

    def _teach(self, taken: list[Waiting]) -> dict[str, Any]:
        classes: dict[str, list[Waiting]] = {}
        spelt: dict[str, str] = {}
        for item in taken:
            if item.broken is None:
                classes.setdefault(spelt.setdefault(item.key, item.name), []).append(item)
        source = {name: [self._staging.file(item.id) for item in items] for name, items in classes.items()}
        before = self._keeper.model.class_facts if self._keeper.model is not None else []
        with self._keeper.changing() as model:
            lesson = model.learn(source, on_progress=_Progress(self._tell), should_stop=self._stop.is_set)
            self._tell(stage="saving", done=0, total=0, seconds_left=None)
        if self._small.on:
            try:
                self._small.follow(before)  # what an undone lesson left is no longer needed
                for name, items in classes.items():
                    self._small.add(name, [self._staging.thumbnail(item.id).read_bytes() for item in items[-MOST:]])
            except (UserError, OSError) as error:  # the model is written and counts, whatever becomes of these
                lesson.warnings.append(f"no small pictures are kept of this lesson: {error}")
        for told in (lesson.warnings, lesson.unreadable):
            told[:] = self._with_titles(told, taken)
        broken = [f"{item.title}: {item.broken}" for item in taken if item.broken is not None]
        return lesson_json(lesson, broken, len(model.classes))

    def _with_titles(self, lines: list[str], taken: list[Waiting]) -> list[str]:
        """The lines with the titles of pictures in place of their paths in the staging folder, which are private."""
        titles = {item.id: item.title or "a picture" for item in taken}
        file = re.compile(re.escape(f"{self._staging.folder}/") + r"([0-9a-f]+)\.picture")
        return [file.sub(lambda found: titles.get(found[1], "a picture"), line) for line in lines]

    def _tell(self, **news: Any) -> None:
        self.state = {**(self.state or {}), **news}
        self._hub.publish("lesson", self.state)


class _Progress:
    """Passes on the progress of a lesson at a limited rate, with the time left."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._stage, self._began, self._told = "", 0.0, 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._told = stage, now, 0.0
        if now - self._told >= BETWEEN_SECONDS:
            self._told = now
            left = (now - self._began) / done * (total - done) if done else None
            self._tell(stage=stage, done=done, total=total, seconds_left=left)


def lesson_json(lesson: Lesson, broken: list[str], classes: int) -> dict[str, Any]:
    """What came of a lesson.

    Args:
        lesson: What `learn` returned.
        broken: A line for each picture that could not be read when it came.
        classes: Classes that the model knows now; with one alone there is no accuracy, because it is always right.
    """
    return {
        "new": lesson.new,
        "again": lesson.again,
        "unreadable": [*broken, *lesson.unreadable],
        "repeated": len(lesson.repeated),
        "held_out": lesson.evaluation.pictures,
        "left_one_out": lesson.left_one_out,
        "accuracy": lesson.accuracy if classes > 1 else None,
        "interval": lesson.evaluation.interval,
        "confused": [
            {"true": pair.true, "guess": pair.guess, "pictures": pair.pictures}
            for pair in lesson.evaluation.confused[:CONFUSED]
        ],
        "warnings": lesson.warnings,
    }

"""Progress in notebooks: a bar that is updated in place, shown by itself where an IPython kernel is running."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from clipcil.experiment.display import Display, PlainDisplay

PAUSE = 0.1
"""Seconds between two updates of the bar: each one is a message to the browser."""


def in_notebook() -> bool:
    """Whether an IPython kernel runs this code: Jupyter, Colab, or the notebook of an editor."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class NotebookBar:
    """A progress bar in the output of a notebook cell. Needs nothing but IPython itself."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._updated = 0.0

    def show(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` are done; a total of 0: there is nothing to count."""
        if done not in (0, total) and time.monotonic() - self._updated < PAUSE:
            return
        self._updated = time.monotonic()
        count, place = (f" {done}/{total}", f' max="{total}" value="{done}"') if total else ("", "")
        self._put(f"<progress{place}></progress> {html.escape(what)}{count}")

    def clear(self) -> None:
        """Take the bar away."""
        if self._handle is not None:
            self._put("")

    def _put(self, page: str) -> None:
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(page), display_id=True)
        else:
            self._handle.update(HTML(page))


class NotebookDisplay(PlainDisplay):
    """A line per task, and a bar for the current stage."""

    def __init__(self) -> None:
        super().__init__()
        self._bar, self._stage = NotebookBar(), ("", 0, 0)

    def stage(self, name: str, steps: int) -> None:
        self._stage = (name, 0, steps)
        if name:
            self._bar.show(*self._stage)
        else:
            self._bar.clear()

    def advance(self) -> None:
        name, done, total = self._stage
        self._stage = (name, done + 1, total)
        self._bar.show(*self._stage)

    def progress(self, what: str, done: int, total: int) -> None:
        self._bar.show(f"{what} pictures", done, total)

    def stop(self) -> None:
        self._bar.clear()


def default_display() -> Display:
    """A display with a progress bar in a notebook, one that prints nothing elsewhere."""
    return NotebookDisplay() if in_notebook() else Display()


@contextmanager
def notebook_progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """`on_progress(stage, done, total)` that shows a bar in a notebook until the block ends; None elsewhere."""
    if not in_notebook():
        yield None
        return
    bar = NotebookBar()
    try:
        yield bar.show
    finally:
        bar.clear()

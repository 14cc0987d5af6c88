"""Progress in notebooks: a bar that is updated in place, shown where an IPython kernel is running."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
        """Remove the bar."""
        if self._handle is not None:
            self._put("")

    def _put(self, page: str) -> None:
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(page), display_id=True)
        else:
            self._handle.update(HTML(page))


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

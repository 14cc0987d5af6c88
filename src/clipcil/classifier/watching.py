"""Watching folders: every picture that appears is yielded once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from clipcil.data.sources import list_files
from clipcil.errors import UserError

PAUSE = 1.0
"""Seconds between two looks at the folder."""


def watch(
    folders: list[Path], should_stop: Callable[[], bool] = lambda: False, pause: float = PAUSE
) -> Iterator[list[Path]]:
    """Yield the pictures that are new in the folders, again and again, those that are there at the start first.

    A file counts as new when its size and time of change are the same in two looks, so that a picture still being
    copied is left for later; a file that is changed afterwards is new again.

    Args:
        folders: What to watch, with everything below.
        should_stop: Asked before every look.
        pause: Seconds between two looks.

    Raises:
        UserError: There is no such folder.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; --watch watches folders")
    done: dict[Path, tuple[int, int]] = {}
    last: dict[Path, tuple[int, int]] = {}
    while not should_stop():
        now = {path: mark for folder in folders for path in list_files(folder) if (mark := _mark(path)) is not None}
        ready = [path for path, mark in now.items() if done.get(path) != mark and last.get(path) == mark]
        done.update((path, now[path]) for path in ready)
        last = now
        if ready:
            yield ready
        time.sleep(pause)


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:  # gone again
        return None
    return status.st_size, status.st_mtime_ns

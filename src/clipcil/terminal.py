"""Encoding of terminal output, and the signals that stop a command."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from clipcil.storage import STOPS


def escape_what_cannot_be_shown() -> None:
    """Let stdout and stderr take any text: a character that the terminal's encoding lacks becomes an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def stops_once(for_good: bool) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM, SIGHUP or SIGQUIT raises KeyboardInterrupt, so that cleanup code runs.

    The second is ignored while the cleanup runs; the third ends the process at once. A signal that was ignored when
    the process began (`nohup`, a background job) stays ignored.

    Args:
        for_good: Keep the handlers after the block, when the process is about to end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 2:
            os._exit(130)
        if seen == 1:
            raise KeyboardInterrupt("" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}")

    old = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in old.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        if not for_good:
            for number, handler in old.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

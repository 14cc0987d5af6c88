"""Signals that ask a process to stop: they raise KeyboardInterrupt, and wait while files are replaced."""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM
from typing import Any

STOPS = (SIGINT, SIGTERM, SIGHUP, SIGQUIT)


@contextmanager
def stops_once(for_good: bool) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM, SIGHUP or SIGQUIT raises KeyboardInterrupt, so that cleanup code runs.

    The second is ignored while the cleanup runs; the third ends the process at once. A signal that was ignored when
    the process began (`nohup`, a background job) stays ignored.

    Args:
        for_good: Keep the handlers after the block, when the process is about to end; there no signal is the first.
    """
    seen = 0

    def stop(number: int, _: Any) -> None:
        nonlocal seen
        seen += 1
        if seen > 2:
            os._exit(130)
        if seen == 1:
            raise KeyboardInterrupt("" if number == SIGINT else f"stopped by {signal.Signals(number).name}")

    with _handled([number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN], stop, for_good):
        try:
            yield
        finally:
            seen = max(seen, 1)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer the signals of `STOPS` until the block ends, so that a write is completed."""
    waiting: list[int] = []
    try:
        with _handled(STOPS, lambda number, _: waiting.append(number)):
            yield
    finally:
        if waiting:
            signal.raise_signal(waiting[0])


@contextmanager
def _handled(numbers: Iterable[int], handler: Callable[[int, Any], object], for_good: bool = False) -> Iterator[None]:
    """Install a handler, for the block or `for_good`; only the main thread is given signals."""
    in_main = threading.current_thread() is threading.main_thread()
    old = {number: signal.signal(number, handler) for number in numbers} if in_main else {}
    try:
        yield
    finally:
        for number, before in () if for_good else old.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)

"""Signals that ask a process to stop: they raise KeyboardInterrupt, and wait while files are replaced."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from signal import SIGALRM, SIGHUP, SIGINT, SIGQUIT, SIGTERM
from traceback import walk_stack
from typing import Any

STOPS = (SIGINT, SIGTERM, SIGHUP, SIGQUIT)
AGAIN = 0.02
"""Seconds until a stop that came at a bad moment is tried again."""


@contextmanager
def stops_once(for_good: bool) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM, SIGHUP or SIGQUIT raises KeyboardInterrupt, after an import has ended, so that cleanup
    code runs.

    The second is ignored while the cleanup runs; the third ends the process at once. A signal that was ignored when
    the process began (`nohup`, a background job) stays ignored.

    Args:
        for_good: Keep the handlers after the block, when the process is about to end; there no signal is the first.
    """
    seen, said = 0, ""

    def stop(number: int, frame: Any) -> None:
        nonlocal seen, said
        seen += 1
        if seen > 2:
            os._exit(130)
        if seen == 1:
            said = "" if number == SIGINT else f"stopped by {signal.Signals(number).name}"
            interrupt(number, frame)

    def interrupt(_: int, frame: Any) -> None:
        if any(each.f_code.co_filename.startswith("<frozen importlib") for each, _ in walk_stack(frame)):
            signal.setitimer(signal.ITIMER_REAL, AGAIN)  # torch aborts if its import is interrupted
        else:
            raise KeyboardInterrupt(said)

    def lost(found: Any) -> None:
        if isinstance(found.exc_value, KeyboardInterrupt):  # raised in a callback, where Python would only print it
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
        else:
            hook(found)

    hook, sys.unraisablehook = sys.unraisablehook, lost
    numbers = [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    with _handled([SIGALRM], interrupt, for_good), _handled(numbers, stop, for_good):
        try:
            yield
        except Exception as error:
            if seen and not any(isinstance(each, KeyboardInterrupt) for each in _contexts(error)):
                raise KeyboardInterrupt(said) from error  # which code in C had turned into an error of its own
            raise
        finally:
            if seen:
                signal.setitimer(signal.ITIMER_REAL, 0)
            seen = max(seen, 1)
            sys.unraisablehook = hook


def _contexts(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that were being handled when it was raised."""
    while error is not None:
        yield error
        error = error.__context__


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer the signals of `STOPS` until the block ends, so that a write is completed."""
    waiting: list[int] = []
    try:
        with _handled((*STOPS, SIGALRM), lambda number, _: waiting.append(number)):
            yield
    finally:
        for number in waiting:  # the first that is not ignored raises
            signal.raise_signal(number)


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

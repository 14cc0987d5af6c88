"""Server-sent events for every open page: only the newest of each kind, so that a slow listener costs no memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

ALIVE_SECONDS = 15.0
"""A comment is sent after this much silence, so that a connection that is gone is noticed."""


class Hub:
    """Hands events from any thread to the listeners on the event loop."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: set[_Listener] = set()

    def open(self) -> None:
        """Bind the hub to the running event loop."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Let every listener go."""
        self.closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    @property
    def full(self) -> bool:
        return len(self._listeners) >= self.most

    def publish(self, kind: str, value: Any) -> None:
        """Tell every listener; an event of this kind that a listener has not read yet is replaced."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._spread, kind, json.dumps(value, ensure_ascii=False))

    def _wake(self) -> None:
        for listener in self._listeners:
            listener.wake.set()

    def _spread(self, kind: str, text: str) -> None:
        for listener in self._listeners:
            listener.pending[kind] = text
            listener.wake.set()

    async def listen(self, first: dict[str, Any]) -> AsyncIterator[str]:
        """Server-sent events as text, beginning with those in `first`."""
        listener = _Listener({kind: json.dumps(value, ensure_ascii=False) for kind, value in first.items()})
        self._listeners.add(listener)
        try:
            while not self.closed:
                listener.wake.clear()  # before sending: an event that comes in the meantime wakes it again
                while listener.pending:
                    kind = next(iter(listener.pending))
                    yield f"event: {kind}\ndata: {listener.pending.pop(kind)}\n\n"
                try:
                    await asyncio.wait_for(listener.wake.wait(), ALIVE_SECONDS)
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            self._listeners.discard(listener)


class _Listener:
    def __init__(self, pending: dict[str, str]) -> None:
        self.pending = pending
        self.wake = asyncio.Event()

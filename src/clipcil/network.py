"""Whether anything may be fetched from the network.

What the user named may be fetched. What a folder names, which a stranger may have written, is looked for on this
machine alone, unless the user said otherwise: asking for it would send the user's token for what the stranger chose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ASK_FIRST = "nothing is fetched on behalf of a folder: give --allow-download, or name the backbone with --backbone"
_allowed: ContextVar[bool] = ContextVar("downloads allowed", default=True)


@contextmanager
def downloads(allowed: bool) -> Iterator[None]:
    """Inside the block nothing is fetched unless `allowed`, nor if a block around this one forbids it.

    >>> with downloads(False), downloads(True):
    ...     downloads_allowed()
    False
    """
    token = _allowed.set(allowed and _allowed.get())
    try:
        yield
    finally:
        _allowed.reset(token)


def downloads_allowed() -> bool:
    """Whether something that is not on this machine may be fetched now."""
    return _allowed.get()

"""Whether anything may be fetched from the network.

A repository that the user named may be fetched. One that only an untrusted folder names is looked for on this machine,
unless the user allows more: a request would send the user's token to a repository that the folder's author chose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ASK_FIRST = (
    "a backbone named only by a folder is not downloaded; allow it (--allow-download; in Python allow_download=True),"
    " or name the backbone yourself (--backbone; in Python backbone=)"
)
_allowed: ContextVar[bool] = ContextVar("downloads allowed", default=True)
_told: ContextVar[bool] = ContextVar("told to download", default=False)


@contextmanager
def allow_downloads(told: bool = True) -> Iterator[None]:
    """Inside the block, repositories that folders name may be fetched too, if the user said so (`told`)."""
    token = _told.set(told or _told.get())
    try:
        yield
    finally:
        _told.reset(token)


@contextmanager
def on_behalf_of_a_folder(named: bool = False) -> Iterator[None]:
    """Inside the block nothing is fetched, unless the user `named` it or allowed it with `allow_downloads`.

    >>> with on_behalf_of_a_folder():
    ...     downloads_allowed()
    False
    >>> with allow_downloads(), on_behalf_of_a_folder():
    ...     downloads_allowed()
    True
    """
    token = _allowed.set(_told.get() or (named and _allowed.get()))
    try:
        yield
    finally:
        _allowed.reset(token)


def downloads_allowed() -> bool:
    """Whether files that are not on this machine may be fetched now."""
    return _allowed.get()

"""Whether anything may be fetched from the network.

A repository that the user named may be fetched. One that only an untrusted folder names is looked for on this machine,
unless the user allows more: a request would send the user's token to a repository that the folder's author chose.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

ASK_FIRST = (
    "a backbone named only by a folder is not downloaded; allow it (--allow-download; in Python allow_download=True),"
    " or name the backbone yourself (--backbone; in Python backbone=)"
)
NOTHING, NAMED, ALL = range(3)
"""Levels: no repository may be fetched, only those that the user named, or those that folders name, too."""
_level: ContextVar[int] = ContextVar("level of downloads", default=NAMED)


@contextmanager
def _at(level: int) -> Iterator[None]:
    token = _level.set(level)
    try:
        yield
    finally:
        _level.reset(token)


def allow_downloads(allow: bool = True) -> AbstractContextManager[None]:
    """Inside the block, repositories that folders name may be fetched too, if the user allows it."""
    return _at(ALL if allow else _level.get())


def on_behalf_of_a_folder(named: bool = False) -> AbstractContextManager[None]:
    """Inside the block nothing is fetched, unless the user `named` it or allowed it with `allow_downloads`.

    >>> with on_behalf_of_a_folder():
    ...     downloads_allowed()
    False
    >>> with allow_downloads(), on_behalf_of_a_folder():
    ...     downloads_allowed()
    True
    """
    return _at(_level.get() if named or _level.get() == ALL else NOTHING)


def downloads_allowed() -> bool:
    """Whether files that are not on this machine may be fetched now."""
    return _level.get() != NOTHING

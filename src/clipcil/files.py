"""Files that are written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import IO, Any

from clipcil.errors import UserError

LOCK = ".lock"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends well, flush it to disk and rename it to `path`.

    A crash at any moment leaves either the old file or the new one, never a part of either.
    """
    part: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
        part = Path(name)
        os.close(handle)
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.chmod(0o644)
        part.replace(path)
        _flush_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if part is not None:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Make a rename outlive a power cut. Not every file system can; the file is whole either way."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_text(path: Path, text: str) -> None:
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")  # file names need not be UTF-8


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """Where preprocessed pictures are kept: `$CLIPCIL_CACHE`, else the user's cache folder."""
    if root := os.environ.get("CLIPCIL_CACHE"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "clipcil"


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM until the block is done, so that a write under way is finished."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    old = {number: signal.signal(number, lambda got, _: waiting.append(got)) for number in (SIGINT, SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        if waiting:
            signal.raise_signal(waiting[0])


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold `folder` for one writer. The lock ends with the process, however it ends.

    What a killed process left half written is swept away. Where nothing was written in the end, the lock is taken away
    again, and the folder if it was made for it: a command that was refused leaves no trace.
    """
    fresh, before = not folder.exists(), _names(folder)
    with _hold(folder):
        for part in (*folder.glob(".*.part"), *folder.glob("checkpoint/**/.*.part")):
            with suppress(OSError):
                part.unlink()
        try:
            yield
        finally:
            if LOCK not in before and _names(folder) == before | {LOCK}:
                with suppress(OSError):
                    (folder / LOCK).unlink()
                    if fresh:
                        folder.rmdir()


def _names(folder: Path) -> set[str]:
    try:
        return {entry.name for entry in folder.iterdir()}
    except OSError:
        return set()


@contextmanager
def _hold(folder: Path) -> Iterator[None]:
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _open_for_good(folder / LOCK)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino != (folder / LOCK).stat().st_ino:
                raise OSError("its last holder has just taken it away")
        except OSError as error:
            raise UserError(f"{folder} is in use by another process; wait for it, or take another folder") from error
        yield


def _open_for_good(path: Path) -> IO[bytes]:
    # Without O_NOFOLLOW a lock that is a link to somebody's file would empty that file.
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), "rb+")

"""Atomic writes: a file is written completely or not at all, and only files of clipcil are replaced.

Symbolic links are never followed when writing: a link is replaced itself, not its target, and a file that is appended
to is opened without following links. What was written is read back before it replaces the file that was there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM
from typing import IO, Any, BinaryIO

import tomli_w

from clipcil.errors import UserError, printable
from clipcil.reading import parse_json, parse_toml

LOCK = ".lock"


class InUseError(UserError):
    """Another process holds the folder."""


STOPS = (SIGINT, SIGTERM, SIGHUP, SIGQUIT)
"""Signals that ask a process to stop."""
_HELD = re.compile(rb"(process \d+ \(.*\)\n)?", re.DOTALL)
_PART = re.compile(r"\.(.+)\.[0-9a-f]{12}\.part")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; if the block succeeds, flush it to disk and rename it to `path`.

    A crash at any moment leaves either the old file or the new one, never a part of either. The new file has the
    permissions that the umask leaves it.
    """
    part = path.with_name(f".{_cut(path.name, 100)}.{secrets.token_hex(6)}.part")
    made = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
        made = True
        yield part
        with part.open("rb") as file:  # not for writing: a copy of a file that is read-only is so too
            os.fsync(file.fileno())
        part.replace(path)
        _flush_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if made:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def need_writable(path: Path) -> None:
    """Refuse a place where `whole_file` cannot write, before any work is done for the file.

    Raises:
        UserError: The line says why.
    """
    with suppress(_TriedError), whole_file(path):
        raise _TriedError


class _TriedError(Exception):
    """Leaves `whole_file` without a file."""


def _cut(text: str, most: int) -> str:
    """The beginning of a text, of at most `most` bytes."""
    return text.encode(errors="surrogateescape")[:most].decode(errors="ignore")


def sweep_parts(folder: Path, owns: Callable[[str], bool]) -> None:
    """Delete what a killed `whole_file` left in `folder`, of the files that `owns(name)` says are ours."""
    for name in part_names(folder, owns):
        with suppress(OSError):
            (folder / name).unlink()


def part_names(folder: Path, owns: Callable[[str], bool]) -> set[str]:
    """Names of the files that a killed `whole_file` left in `folder`."""
    return {name for name in _names(folder) if (found := _PART.fullmatch(name)) and owns(found[1])}


def _flush_folder(folder: Path) -> None:
    """Make a rename survive a power failure. Not every file system can; the file is complete either way."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by a file of these bytes, once they have been read back."""
    with whole_file(path) as part:
        part.write_bytes(data)
        if part.read_bytes() != data:
            raise OSError("what was written cannot be read back")


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8", "backslashreplace"))  # file names in it need not be UTF-8


def write_json(path: Path, value: Any) -> None:
    """Write JSON that can be read again: a NaN, and text that is not valid Unicode, are refused."""
    try:
        data = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise UserError(f"cannot write {path}: {_not_text(error)}") from error
    parse_json(data, f"what is to be written to {path}")
    write_bytes(path, data + b"\n")


def write_toml(path: Path, table: Mapping[str, Any]) -> None:
    """Write TOML that is read back as the same table."""
    write_bytes(path, toml_bytes(path, table))


def toml_bytes(path: Path, table: Mapping[str, Any]) -> bytes:
    """The contents of a TOML file `path` that is read back as `table`; it cannot hold a name that is not UTF-8."""
    try:
        text = tomli_w.dumps(table)
        data = text.encode()
    except ValueError as error:
        raise UserError(f"cannot write {path}: {_not_text(error)}") from error
    if parse_toml(text, f"what is to be written to {path}") != table:
        raise UserError(f"cannot write {path}: its values would not be read back as they are")
    return data


def _not_text(error: ValueError) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"the name '{printable(_word(error))}' is not UTF-8; rename the file, folder or class"
    return str(error)


def _word(error: UnicodeEncodeError) -> str:
    """The quoted text around the letter that cannot be written."""
    before, after = error.object[: error.start].rpartition('"')[2], error.object[error.start :].partition('"')[0]
    return (before + after)[:120]


def open_log(path: Path) -> BinaryIO:
    """Open a file of our own for adding lines, made if it is not there; a link or a device in its place is refused."""
    return os.fdopen(_open_own(path, os.O_APPEND), "ab+")


def _open_own(path: Path, flags: int = 0) -> int:
    """A handle of a regular file of our own, made if it is not there.

    A link is not followed, because it may lead to somebody's file; a pipe in its place would never open.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path.name} is not a regular file")
    return handle


def refuse_links(*paths: Path) -> None:
    """Refuse symbolic links in place of files or folders of clipcil."""
    for path in paths:
        if path.is_symlink():
            raise UserError(f"{path} is a symbolic link, and what it leads to is not ours to change; remove the link")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """Where preprocessed pictures are kept: `$CLIPCIL_CACHE`, else the user's cache folder."""
    if root := os.environ.get("CLIPCIL_CACHE"):
        return Path(root)
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root) / "clipcil"
    try:
        return Path.home() / ".cache" / "clipcil"
    except RuntimeError as error:
        raise UserError("there is no home folder to keep a cache in; set CLIPCIL_CACHE to a folder") from error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C and the other signals of `STOPS` until the block ends, so that a write is completed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    old = {number: signal.signal(number, lambda got, _: waiting.append(got)) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if waiting:
            signal.raise_signal(waiting[0])


@contextmanager
def run_lock(folder: Path, who: str = "") -> Iterator[None]:
    """Lock `folder` for one writer. The lock is released when the process ends, however it ends.

    Where nothing was written, the lock file is removed again, and the folder if it was created for it: a command that
    was refused leaves no trace.

    Args:
        folder: Made if it is not there.
        who: Who holds it, for the message to others; default: the command.

    Raises:
        UserError: Another process holds it; the line says which.
    """
    fresh, before = not folder.exists(), _names(folder)
    with _hold(folder, who or " ".join(map(printable, (Path(sys.argv[0]).name, *sys.argv[1:2])))):
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
def _hold(folder: Path, who: str) -> Iterator[None]:
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(_open_own(folder / LOCK), "rb+", buffering=0)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error
    with file:
        if not _HELD.fullmatch(file.read(1000)):
            raise UserError(f"{folder / LOCK} is not a lock of clipcil; name another folder")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino != (folder / LOCK).stat().st_ino:
                raise OSError("its last holder has just taken it away")
        except OSError as error:
            raise InUseError(f"{folder} is in use by {_holder(file)}; wait for it, or take another folder") from error
        with suppress(OSError):  # a full disk: the lock holds all the same
            file.truncate(0)
            held = f"process {os.getpid()} ({_cut(who, 150)}, since {time.strftime('%H:%M')})\n"
            os.pwrite(file.fileno(), held.encode(), 0)
        try:
            yield
        finally:
            with suppress(OSError):
                file.truncate(0)


def _holder(file: IO[bytes]) -> str:
    try:
        return printable(os.pread(file.fileno(), 400, 0).decode(errors="replace").strip()) or "another process"
    except OSError:
        return "another process"

"""The storage layer: atomic writes, one lock, the claim of a folder, and bounded reads of files from strangers.

A file is written in `.tmp/` beside its place and renamed: it is there whole or not at all. Symbolic links are never
followed when writing, nor when reading a file that a folder holds. A `UserError` of one line names the file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import shutil
import signal
import stat
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM
from typing import Any, BinaryIO

import tomli_w

from clipcil.errors import UserError, first_line, printable

STOPS = (SIGINT, SIGTERM, SIGHUP, SIGQUIT)
"""Signals that ask a process to stop."""
LOCK = ".lock"
TEMPORARY = ".tmp"
"""Folder of half-written files, inside the folder that they are written for."""
MOST_TEXT = 256 * 2**20
"""Maximum bytes of a JSON or CSV file; the descriptions of 200 classes take about 20 MiB."""
MOST_TOML = 8 * 2**20
"""Maximum bytes of a TOML file: 50,000 classes. The parser is written in Python and slow."""
MOST_TENSORS = 32 * 2**30
"""Maximum bytes of a safetensors file; it is read into memory unchanged, so this bounds the memory too."""

DEEPEST = 32
"""Maximum depth of nested tables."""


class MissingFileError(UserError):
    """The file is not there."""


class InUseError(UserError):
    """Another process holds the lock of the folder."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; if the block succeeds, flush that file to disk and rename it to `path`.

    Raises:
        UserError: The file cannot be written; the line says why.
    """
    try:
        part = _temporary(path.parent)
        try:
            yield part
            with part.open("rb") as file:  # for reading: the file may be a read-only copy
                os.fsync(file.fileno())
            part.replace(path)
            _flush_folder(path.parent)
        finally:
            part.unlink(missing_ok=True)
            with suppress(OSError):
                part.parent.rmdir()  # fails where another process is writing a file, too
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def _temporary(folder: Path) -> Path:
    """A new empty file in the folder of half-written files."""
    place = folder / TEMPORARY
    refuse_links(place)
    for _ in range(100):  # another process may remove the empty folder in between
        place.mkdir(parents=True, exist_ok=True)
        part = place / secrets.token_hex(8)
        with suppress(FileNotFoundError):
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
            return part
    raise OSError(f"{place} disappears again and again")


def _flush_folder(folder: Path) -> None:
    """Make a rename survive a power failure. Not every file system can; the file is complete either way."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by a file of these bytes."""
    with whole_file(path) as part:
        part.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a UTF-8 file; letters of file names that are not UTF-8 are written as escapes."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by a JSON file; a NaN, and text that is not valid Unicode, are refused."""
    try:
        data = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise UserError(f"cannot write {path}: {_not_text(error)}") from error
    write_bytes(path, data + b"\n")


def write_toml(path: Path, table: Mapping[str, Any]) -> None:
    """Replace `path` by a TOML file; text that is not valid Unicode is refused."""
    write_bytes(path, toml_bytes(path, table))


def toml_bytes(path: Path, table: Mapping[str, Any]) -> bytes:
    """The contents of a TOML file; `path` names it in errors."""
    try:
        return tomli_w.dumps(table).encode()
    except ValueError as error:
        raise UserError(f"cannot write {path}: {_not_text(error)}") from error


def _not_text(error: ValueError) -> str:
    if not isinstance(error, UnicodeEncodeError):
        return str(error)
    before, after = error.object[: error.start].rpartition('"')[2], error.object[error.start :].partition('"')[0]
    return f"the name '{printable((before + after)[:120])}' is not UTF-8; rename the file, folder or class"


def need_writable(path: Path) -> None:
    """Refuse a place where `whole_file` cannot write, before any work is done for the file."""
    with suppress(_TriedError), whole_file(path):
        raise _TriedError


class _TriedError(Exception):
    """Leaves `whole_file` without a file."""


def open_log(path: Path) -> BinaryIO:
    """Open a file for adding lines; it is created where it is missing. A link or a device in its place is refused."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path.name} is not a regular file")
    return os.fdopen(handle, "ab+")


def refuse_links(*paths: Path) -> None:
    """Refuse symbolic links in place of files or folders of clipcil."""
    for path in paths:
        if path.is_symlink():
            raise UserError(f"{path} is a symbolic link, which is not followed when writing; remove the link")


def claim(path: Path, mark: str, what: str, ignore: tuple[str, ...] = ()) -> None:
    """Refuse to replace anything that clipcil did not write.

    Args:
        path: A folder, which must be new, empty, or hold a file named `mark`; or a file, which must be new or have the
            text `mark` in its first 4096 bytes.
        mark: What shows that clipcil wrote it.
        what: What is written there, for the message.
        ignore: Names of files that do not count.
    """
    refuse_links(path)
    if path.is_dir():
        others = {entry.name for entry in path.iterdir()} - {LOCK, TEMPORARY, *ignore}
        foreign = bool(others) and mark not in others
    else:
        foreign = path.exists() and mark.encode() not in read_bytes(path, MOST_TENSORS)[:4096]
    if foreign:
        raise UserError(f"{path} is not empty and holds no {what} of clipcil; name another place")


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """Where preprocessed pictures and features are kept: `$CLIPCIL_CACHE`, else the user's cache folder."""
    if root := os.environ.get("CLIPCIL_CACHE"):
        return Path(root)
    from platformdirs import user_cache_path

    try:
        return user_cache_path("clipcil", appauthor=False)
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
    """Lock `folder` for one writer, and delete what a killed writer left half written in it.

    The lock is released when the process ends, however it ends. Where nothing was written, the lock file is removed
    again, and the folder if it was created for it: a command that was refused leaves no trace.

    Raises:
        InUseError: Another process holds it.
        UserError: The folder cannot be written to, or its lock file is not ours.
    """
    from filelock import FileLock, Timeout

    fresh, before = not folder.exists(), _names(folder)
    path = folder / LOCK
    refuse_links(path)
    if path.exists() and not (path.is_file() and read_bytes(path, links=False)[:8] in (b"", b"process ")):
        raise UserError(f"{path} is not a lock of clipcil; name another folder")
    lock = FileLock(path, is_singleton=False, thread_local=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InUseError(f"{folder} is in use by another process; wait for it, or take another folder") from error
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error
    try:
        sweep(folder)
        yield
    finally:
        if LOCK not in before and _names(folder) <= before | {LOCK}:
            with suppress(OSError):
                path.unlink()
                if fresh:
                    folder.rmdir()
        lock.release()


def sweep(folder: Path) -> None:
    """Delete what a killed process left half written in `folder`; the caller holds its lock."""
    place = folder / TEMPORARY
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)


def _names(folder: Path) -> set[str]:
    try:
        return {entry.name for entry in folder.iterdir()}
    except OSError:
        return set()


def is_folder(path: Path) -> bool:
    """Whether there is a folder; False for a name that no file system takes, such as one of 5,000 letters."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_file(path: Path) -> bool:
    """Whether there is a file."""
    try:
        return path.is_file()
    except OSError:
        return False


def open_regular(path: Path, *, links: bool = False) -> BinaryIO:
    """Open a regular file for reading; reading a pipe or a device might never end.

    Args:
        path: The file.
        links: Follow a symbolic link. For files that a user named, not for files found in a folder.

    Raises:
        MissingFileError: There is no such file.
        UserError: It is a link, or not a regular file, or cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            raise UserError(f"{path} is a symbolic link, which is not followed here") from error
        raise UserError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"{path} is not a regular file")
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, most: int = MOST_TEXT, *, links: bool = False) -> bytes:
    """The contents of a regular file of at most `most` bytes."""
    with open_regular(path, links=links) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            data = file.read(size + 1) if size <= most else b""
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror or error})") from error
    if size > most or len(data) > size:
        raise UserError(f"{path} is larger than the {most / 2**20:.0f} MiB that such a file may have")
    return data


def read_text(path: Path, most: int = MOST_TEXT, *, links: bool = False) -> str:
    """The contents of a UTF-8 file without a byte-order mark."""
    try:
        return read_bytes(path, most, links=links).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from error


def read_json(path: Path, most: int = MOST_TEXT, *, links: bool = False) -> Any:
    """The value in a JSON file; its numbers are finite."""
    return parse_json(read_text(path, most, links=links), str(path))


def parse_json(text: str | bytes, called: str) -> Any:
    """`read_json` for a text in memory; `called` names it in errors."""
    return _parse(lambda: json.loads(text, parse_constant=_finite, parse_float=_finite), called, "JSON")


def read_toml(path: Path, most: int = MOST_TOML, *, links: bool = False) -> dict[str, Any]:
    """The table in a TOML file; its numbers are finite."""
    return parse_toml(read_text(path, most, links=links), str(path))


def parse_toml(text: str, called: str) -> dict[str, Any]:
    """`read_toml` for a text in memory; `called` names it in errors."""
    table: dict[str, Any] = _parse(lambda: tomllib.loads(text, parse_float=_finite), called, "TOML")
    return table


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


def _parse(parse: Callable[[], Any], called: str, what: str) -> Any:
    try:
        value = parse()
    except RecursionError as error:
        raise UserError(f"{called} nests its tables deeper than {DEEPEST} levels") from error
    except ValueError as error:  # invalid JSON or TOML, or a number that is not finite
        raise UserError(f"{called} cannot be read as {what} ({printable(first_line(error))[:120]})") from error
    _check_plain(value, called)
    return value


def _check_plain(value: Any, called: str) -> None:
    """Refuse deep nesting, lone surrogates, numbers of more than 64 bits, and dates."""
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth > DEEPEST:
            raise UserError(f"{called} nests its tables deeper than {DEEPEST} levels")
        if isinstance(item, dict):
            waiting += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list):
            waiting += [(part, depth + 1) for part in item]
        elif isinstance(item, str):
            if not item.isascii() and any("\ud800" <= letter <= "\udfff" for letter in item):
                raise UserError(f"{called} holds text that is not valid Unicode ({printable(item)[:60]})")
        elif item is not None and not isinstance(item, bool | int | float):
            raise UserError(f"{called} holds a {type(item).__name__}; text, numbers, lists and tables are read")
        elif isinstance(item, int) and not -(2**63) <= item < 2**64:
            raise UserError(f"{called} holds a number of more than 64 bits")

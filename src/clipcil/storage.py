"""The storage layer: atomic writes, one lock, the claim of a folder, and bounded reads of files from strangers.

A file is written in `.tmp/` beside its place and renamed: it is there whole or not at all. Symbolic links are never
followed when writing, nor when reading a file that a folder holds. A `UserError` of one line names the file.
"""

import errno
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import tomli_w
from filelock import FileLock, Timeout
from platformdirs import user_cache_path
from pydantic_core import from_json

from clipcil.errors import UserError, first_line, printable
from clipcil.limits import DEEPEST, MOST_LISTS, MOST_POINTS, MOST_TEXT, MOST_TOML

LOCK = ".lock"
TEMPORARY = ".tmp"
"""Folder of half-written files, inside the folder that they are written for."""


class MissingFileError(UserError):
    """The file is not there."""


class InUseError(UserError):
    """Another process holds the lock of the folder."""


# -- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; if the block succeeds, flush that file to disk and rename it to `path`."""
    with _temporary(path) as part:
        yield part
        with part.open("rb") as file:  # for reading: the file may be a read-only copy
            os.fsync(file.fileno())
        part.replace(path)


def need_writable(path: Path) -> None:
    """Refuse a place where `whole_file` cannot write, before any work is done for the file."""
    with _temporary(path):
        pass


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A new empty file for the contents of `path`; it is deleted after the block, and new folders if that failed."""
    place, missing = path.parent / TEMPORARY, [each for each in path.parents if not each.exists()]
    refuse_links(place)
    try:
        part, handle = _new_file(place)
        try:
            yield part
        finally:
            os.close(handle)
            part.unlink(missing_ok=True)
            _sweep_killed(place)
            _remove_empty([place])  # another process may be writing a file, too
    except BaseException as error:
        _remove_empty(missing)
        if isinstance(error, OSError):
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error
        raise


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove those of the folders that are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _new_file(folder: Path) -> tuple[Path, int]:
    """A new file and the handle that keeps it locked, which `_sweep_killed` respects."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / secrets.token_hex(8)
        with suppress(FileNotFoundError):  # another process removed the empty folder in between
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with suppress(OSError):  # a file system without locks: nothing is swept there
                flock(handle, LOCK_EX)
            if os.fstat(handle).st_nlink:  # otherwise it was swept before it was locked
                return path, handle
            os.close(handle)


def _sweep_killed(place: Path) -> None:
    """Delete files in `place` that killed processes left half written; other processes may be writing there."""
    for path in place.glob("[0-9a-f]" * 16):
        with suppress(OSError, UserError), open_regular(path) as file:
            flock(file, LOCK_SH | LOCK_NB)  # fails while the process that writes it lives
            path.unlink()


def write_bytes(path: Path, *parts: bytes | memoryview) -> None:
    """Replace `path` by a file of these bytes, one part after another."""
    with whole_file(path) as half, half.open("wb") as file:
        file.writelines(parts)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a UTF-8 file; bytes of file names that are not UTF-8 are written as escapes."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by a JSON file; a NaN, and text that is not valid Unicode, are refused."""
    write_bytes(path, _encoded(path, lambda: json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"))


def write_toml(path: Path, table: Mapping[str, Any]) -> None:
    """Replace `path` by a TOML file."""
    write_bytes(path, toml_bytes(path, table))


def toml_bytes(path: Path, table: Mapping[str, Any]) -> bytes:
    """The contents of the TOML file `path`; text that is not valid Unicode is refused."""
    return _encoded(path, lambda: tomli_w.dumps(table))


def _encoded(path: Path, text: Callable[[], str]) -> bytes:
    try:
        return text().encode()
    except UnicodeEncodeError as error:
        name = error.object[: error.start].rpartition('"')[2] + error.object[error.start :].partition('"')[0]
        why = f"the name '{printable(name[:120])}' is not UTF-8; rename the file, folder or class"
        raise UserError(f"cannot write {path}: {why}") from error
    except ValueError as error:
        raise UserError(f"cannot write {path}: {error}") from error


@contextmanager
def open_log(path: Path) -> Iterator[BinaryIO]:
    """Open a file for adding lines; it is created where it is missing. A link in its place is refused."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(path, flags, 0o666), "ab+") as file:
            yield file
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def refuse_links(*paths: Path) -> None:
    """Refuse symbolic links in place of files or folders of clipcil."""
    for path in paths:
        if path.is_symlink():
            raise UserError(f"{path} is a symbolic link, which is not followed when writing; remove the link")


def claim(path: Path, mark: str, what: str, ignore: tuple[str, ...] = ()) -> None:
    """Refuse to replace anything that clipcil did not write, in whose place `what` is to be written.

    A folder must be new, or hold a file named `mark`, or hold nothing but files named in `ignore`. A file must be new,
    or have the text `mark` in its first 4096 bytes.
    """
    refuse_links(path)
    if not path.exists():
        return
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()} - {LOCK, TEMPORARY, *ignore}
        ours = not names or mark in names
    else:
        with open_regular(path) as file:
            ours = mark.encode() in file.read(4096)
    if not ours:
        raise UserError(f"{path} is not empty and holds no {what} of clipcil; name another place")


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Lock `folder` for one writer, and delete files that a killed writer left half written in it.

    The lock is released when the process ends, however it ends. Folders that were created for it and in which nothing
    was written are removed: a command that was refused leaves no trace.
    """
    path, missing = folder / LOCK, [each for each in (folder, *folder.parents) if not each.exists()]
    refuse_links(path)
    lock = FileLock(path, is_singleton=False, thread_local=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InUseError(f"{folder} is in use by another process; wait for it, or take another folder") from error
    except OSError as error:
        _remove_empty(missing)
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error
    try:
        sweep(folder)
        yield
    finally:
        with suppress(OSError):
            if not path.stat().st_size:  # otherwise it is a user's file of this name
                path.unlink()
        _remove_empty(missing)
        lock.release()


def sweep(folder: Path) -> None:
    """Delete files that a killed process left half written in `folder`; the caller holds its lock."""
    place = folder / TEMPORARY
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)


def cache_folder() -> Path:
    """Where preprocessed pictures and features are kept: `$CLIPCIL_CACHE`, else the user's cache folder."""
    root = os.environ.get("CLIPCIL_CACHE")
    return Path(root) if root else user_cache_path("clipcil", appauthor=False)


# -- reading ----------------------------------------------------------------------------------------------------------


def open_regular(path: Path, *, links: bool = False) -> BinaryIO:
    """Open a regular file for reading; reading a pipe or a device might never end.

    Symbolic links are followed only with `links`: for files that a user named, not for files found in a folder.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} is missing") from error
    except OSError as error:
        linked = error.errno == errno.ELOOP
        why = "is a symbolic link, which is not followed here" if linked else f"cannot be read ({error.strerror})"
        raise UserError(f"{path} {why}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"{path} is not a regular file")
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, most: int = MOST_TEXT, *, links: bool = False) -> bytes:
    """The contents of a regular file of at most `most` bytes."""
    with open_regular(path, links=links) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise UserError(f"{path} is larger than the {most / 2**20:.0f} MiB that such a file may have")
        try:
            return file.read()
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror})") from error


def read_text(path: Path, most: int = MOST_TEXT, *, links: bool = False) -> str:
    """The contents of a UTF-8 file without its byte-order mark."""
    try:
        return read_bytes(path, most, links=links).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from error


def read_json(path: Path, most: int = MOST_TEXT, *, links: bool = False) -> Any:
    """The value in a JSON file; its numbers are finite."""
    text = read_text(path, most, links=links)
    if text.count("[") + text.count("{") > MOST_LISTS:
        raise UserError(f"{path} cannot be read as JSON (it has more than {MOST_LISTS:,} lists)")
    return parse_json(text, str(path))


def parse_json(text: str | bytes, called: str) -> Any:
    """`read_json` for a text in memory; `called` names it in errors."""
    return _parse(lambda: from_json(text, allow_inf_nan=False), called, "JSON")


def read_toml(path: Path, *, links: bool = False) -> dict[str, Any]:
    """The table in a TOML file; its numbers are finite."""
    text = read_text(path, MOST_TOML, links=links)
    if sum(line.count(".") ** 2 for line in text.split("\n")) > MOST_POINTS:
        raise UserError(f"{path} cannot be read as TOML (it has keys of thousands of parts)")
    table: dict[str, Any] = _parse(lambda: tomllib.loads(text), str(path), "TOML")
    return table


def _parse(parse: Callable[[], Any], called: str, what: str) -> Any:
    try:
        value = parse()
        _check_plain(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{called} cannot be read as {what} ({printable(first_line(error))[:120]})") from error
    return value


def _check_plain(value: Any, depth: int = 0) -> None:
    """Refuse deep nesting, numbers that are not finite or have more than 64 bits, and dates."""
    if depth > DEEPEST:
        raise ValueError(f"it nests tables deeper than {DEEPEST} levels")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_plain(item, depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("a number is not finite")
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise ValueError("a number has more than 64 bits")
    elif value is not None and not isinstance(value, str):
        raise ValueError(f"it holds a {type(value).__name__}, which is not used here")


def walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Every folder from `root` down and the names of its files, both sorted; links to folders are not followed.

    `os.walk` of Python 3.11 calls itself for each level, so that a deep folder exceeds the recursion limit.
    """
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        for _, inside, files in islice(os.walk(folder), 1):
            waiting += [path for name in sorted(inside, reverse=True) if not (path := folder / name).is_symlink()]
            yield folder, sorted(files)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(path: Path) -> str:
    """A digest of the bytes of a file, or of the names, sizes and times of the files in a folder; empty where there is
    neither."""
    with suppress(OSError, ValueError):
        if path.is_file():
            return sha256(path)
        if path.is_dir():
            found = hashlib.sha256()
            for file in (place / name for place, names in walk(path) for name in names):
                status = file.lstat()
                found.update(f"{str(file)!r} {status.st_size} {status.st_mtime_ns}".encode())
            return found.hexdigest()
    return ""

"""Reading untrusted files: regular files of bounded size, in which every value is shallow, finite and of a known type.

Model folders, runs, checkpoints, descriptions and configs are all read through here. Whatever is wrong with a file is a
`UserError` of one line that names the file and the entry.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Point:
    ...     x: float
    ...     name: str = ""
    >>> typed({"x": 1, "later": "passed over"}, Point)
    Point(x=1.0, name='')
    >>> typed({"x": "one"}, Point)
    Traceback (most recent call last):
    clipcil.errors.UserError: 'x' is 'one'; it must be a number
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import stat
import tomllib
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from clipcil.errors import UserError, first_line, printable

if TYPE_CHECKING:
    from torch import Tensor

MOST_TEXT = 256 * 2**20
"""Maximum bytes of a JSON or CSV file; the descriptions of 200 classes take about 20 MiB."""
MOST_TOML = 8 * 2**20
"""Maximum bytes of a TOML file: 50,000 classes. The parser is written in Python and slow."""
MOST_TENSORS = 32 * 2**30
"""Maximum bytes of a safetensors file; they are read into memory unchanged, so this bounds the memory too."""
DEEPEST = 32
"""Maximum depth of nested tables."""


class MissingFileError(UserError):
    """The file is not there."""


@dataclass(frozen=True)
class Between:
    """Bounds of a number (both included), or of the length of a text or a list; for `Annotated`."""

    low: float
    high: float = math.inf

    def check(self, value: Any, where: str) -> None:
        size = len(value) if isinstance(value, str | list | tuple | dict) else value
        if not self.low <= size <= self.high:
            what = "has a length of" if size is not value else "is"
            raise UserError(f"'{where}' {what} {size}; it must be between {self.low:g} and {self.high:g}")


Count = Annotated[int, Between(0, 2**53)]
Text = Annotated[str, Between(0, 10_000)]


def open_regular(path: Path, *, links: bool = False) -> BinaryIO:
    """Open a regular file for reading; reading a pipe or a device might never end.

    Args:
        path: The file.
        links: Follow a symbolic link. For files that a user named, not for files found in a folder.

    Raises:
        MissingFileError: There is no such file.
        UserError: It is a link, or no regular file, or cannot be opened.
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


def is_folder(path: Path) -> bool:
    """Whether there is a folder; a name that no file system takes, such as one of 5,000 letters, is none."""
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
    """The contents of a text file, which must be UTF-8; a byte-order mark in front is left out."""
    try:
        return read_bytes(path, most, links=links).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from error


def read_json(path: Path, most: int = MOST_TEXT, *, links: bool = False) -> Any:
    """The value in a JSON file: finite numbers, valid Unicode text, at most `DEEPEST` levels."""
    return parse_json(read_text(path, most, links=links), str(path))


def parse_json(text: str | bytes, called: str) -> Any:
    """`read_json` for a text in memory; `called` names it in errors."""
    return _parse(lambda: json.loads(text, parse_constant=_finite, parse_float=_finite), called, "JSON")


def read_toml(path: Path, most: int = MOST_TOML, *, links: bool = False) -> dict[str, Any]:
    """The table in a TOML file, under the same rules as `read_json`."""
    return parse_toml(read_text(path, most, links=links), str(path))


def parse_toml(text: str, called: str) -> dict[str, Any]:
    """`read_toml` for a text in memory; `called` names it in errors."""
    table: dict[str, Any] = _parse(lambda: tomllib.loads(text, parse_float=_finite), called, "TOML")
    return table


def read_tensors(path: Path, sha256: str = "", most: int = MOST_TENSORS) -> dict[str, Tensor]:
    """The tensors of a safetensors file: known number types, every float finite, the checksum as given.

    Args:
        path: The file; not a link.
        sha256: What its SHA-256 must be, in hexadecimal; empty: anything.
        most: Bytes it may have.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    data = read_bytes(path, most)
    if sha256 and hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"{path} does not match its checksum")
    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{path} is no whole safetensors file ({type(error).__name__})") from error
    known = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8}
    known |= {torch.int64, torch.int32, torch.int16, torch.int8}
    for key, value in tensors.items():
        if value.dtype not in known:
            raise UserError(f"{path}: '{key[:80]}' holds {value.dtype}, which is not used here")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise UserError(f"{path}: '{key[:80]}' holds a NaN or an infinity")
    return tensors


def typed(value: Any, kind: Any, where: str = "") -> Any:
    """`value` if it is of type `kind`; a UserError names the first entry that is not.

    Args:
        value: What JSON or TOML gave.
        kind: A scalar type, `list[…]`, `tuple[…, ...]`, `dict[str, …]`, a union, a dataclass (it is built; keys that
            it does not have are ignored), a TypedDict (keys it does not have are kept), or one of these with
            `Annotated[…, Between(low, high)]`.
        where: What the value is called in errors.

    Returns:
        The value; whole numbers as floats where a float is wanted.
    """
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        checked = typed(value, options[0], where)
        for rule in options[1:]:
            if checked is not None:
                rule.check(checked, where)
        return checked
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        return typed(value, next(option for option in options if option is not type(None)), where)
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise _wrong(value, where, "a list")
        return origin(typed(item, options[0], f"{where}[{place}]") for place, item in enumerate(value))
    if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind) or origin is dict or kind is dict:
        if not isinstance(value, dict):
            raise _wrong(value, where, "a table")
        if origin is dict:
            return {key: typed(item, options[1], f"{where}.{key}".lstrip(".")) for key, item in value.items()}
        return value if kind is dict else _fields(value, kind, where)
    if kind is float and type(value) is int and abs(value) < 2**63:
        return float(value)
    if type(value) is not kind:
        raise _wrong(value, where, _NAMES.get(kind, str(kind)))
    return value


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _fields(value: dict[str, Any], kind: Any, where: str) -> Any:
    """A dataclass built from a table, or a table checked against a TypedDict."""
    hints = _hints(kind)
    if dataclasses.is_dataclass(kind):
        needed = {
            field.name
            for field in dataclasses.fields(kind)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        }
    else:
        optional = {key for key, hint in hints.items() if typing.get_origin(hint) is typing.NotRequired}
        needed = set(hints) - optional if kind.__total__ else set()
        hints = {key: _unwrapped(hint) for key, hint in hints.items()}
    before = f"{where}." if where else ""
    if missing := sorted(needed - set(value)):
        raise UserError(f"'{before}{missing[0]}' is missing")
    checked = {key: typed(value[key], hint, f"{before}{key}") for key, hint in hints.items() if key in value}
    if typing.is_typeddict(kind):
        return {**value, **checked}
    return kind(**checked)


def _unwrapped(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.NotRequired else hint


def _wrong(value: Any, where: str, wanted: str) -> UserError:
    shown = printable(value)
    return UserError(f"'{where}' is '{shown[:60]}{'…' if len(shown) > 60 else ''}'; it must be {wanted}")


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
        reason = printable(first_line(error))[:120]
        raise UserError(f"{called} cannot be read as {what} ({reason})") from error
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

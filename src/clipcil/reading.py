"""Values of a known type from JSON and TOML. Being replaced by pydantic models; files are read by `storage`."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from clipcil.errors import UserError, printable
from clipcil.storage import *  # noqa: F403


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


def read_tensors(path: Any, sha256: str = "") -> dict[str, Any]:
    """See `tensor_store.read_tensors`."""
    from clipcil.tensor_store import read_tensors as read

    return read(path, sha256)

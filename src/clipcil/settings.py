"""Options as frozen dataclasses: filled from TOML tables and `key=value` words, written back in full.

An unknown key, a wrong type or a value out of range is one line that names it.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from clipcil import reading
from clipcil.errors import UserError, nearest

T = TypeVar("T")


def build(kind: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """An instance of dataclass `kind` with `values` over its defaults; nested tables fill nested dataclasses."""
    return kind(**_changes(kind(), values, where))


def override(settings: T, values: Mapping[str, Any], where: str = "") -> T:
    """A copy of the dataclass instance `settings` with `values` in place of some of its fields."""
    return dataclasses.replace(settings, **_changes(settings, values, where))  # type: ignore[type-var]


def _changes(settings: Any, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    hints = typing.get_type_hints(type(settings))
    known = [field.name for field in dataclasses.fields(settings)]
    changes: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise UserError(f"there is no setting '{where}{key}'{nearest(key, known)}")
        inner = getattr(settings, key)
        if dataclasses.is_dataclass(inner) and isinstance(value, Mapping):
            changes[key] = override(inner, value, f"{where}{key}.")
        elif dataclasses.is_dataclass(inner) and isinstance(value, type(inner)):
            check_fields(value, f"{where}{key}.")
            changes[key] = value
        elif dataclasses.is_dataclass(value) and type(value) in type(inner).__mro__:  # a Training for a TowerTraining
            given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            changes[key] = override(inner, given, f"{where}{key}.")
        elif dataclasses.is_dataclass(inner):
            first = f"{where}{key}.{dataclasses.fields(inner)[0].name}"
            raise UserError(f"setting '{where}{key}' is '{value}'; it has settings of its own, such as {first}")
        else:
            changes[key] = _convert(value, hints[key], f"{where}{key}")
    return changes


def parse_words(words: Iterable[str]) -> dict[str, Any]:
    """`["stage1.lr=1e-4", "beta=0.1"]` → `{"stage1": {"lr": "1e-4"}, "beta": "0.1"}`."""
    result: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UserError(f"'{word}' is not a setting; write key=value, such as stage1.lr=1e-4")
        result = merge(result, nested({key.strip(): value}))
    return result


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"stage1.lr": 1e-4, "beta": 0.1}` → `{"stage1": {"lr": 1e-4}, "beta": 0.1}`."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        result = merge(result, {name: nested({rest: value}) if rest else value})
    return result


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merged, later ones taking precedence; nested tables are merged key by key."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old = result.get(key, value)
            if isinstance(old, Mapping) != isinstance(value, Mapping):
                raise UserError(f"setting '{key}' is given both as a value and as a table")
            result[key] = merge(old, value) if isinstance(value, Mapping) and old is not value else value
    return result


def to_dict(settings: Any) -> dict[str, Any]:
    """Every setting with its value, as TOML can hold it (None is left out: TOML has no such value)."""

    hints = typing.get_type_hints(type(settings))

    def plain(value: Any, hint: Any = None) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return to_dict(value)
        if hint is float and isinstance(value, int):  # a default written as 0 is the 0.0 that is read back
            return float(value)
        if isinstance(value, tuple | list):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    pairs = (
        (field.name, plain(getattr(settings, field.name), hints[field.name])) for field in dataclasses.fields(settings)
    )
    return {key: value for key, value in pairs if value is not None}


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file of the package or one that a user named."""
    return reading.read_toml(path, links=True)


def check_fields(settings: Any, where: str = "") -> None:
    """Refuse a dataclass instance that was made in Python with a value of a wrong type, or one that is no choice.

    A value that stands for one of the right type, such as "3" for 3, is replaced by it.
    """
    hints = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            check_fields(value, f"{where}{field.name}.")
        else:
            object.__setattr__(settings, field.name, _convert(value, hints[field.name], f"{where}{field.name}"))


def within(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Refuse a number outside low ≤ value ≤ high (NaN is outside)."""
    if not low <= value <= high:
        bounds = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise UserError(f"setting '{name}' is {value}; it must be {bounds}")


def _convert(value: Any, hint: Any, where: str) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        found = [option for option in options if str(option) == str(value)]  # 1 stands for "1"
        if not found:
            raise UserError(f"setting '{where}' is '{value}'{nearest(str(value), map(str, options))}")
        return found[0]
    if origin in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        return _convert(value, next(option for option in options if option is not type(None)), where)
    if origin is tuple:
        items = value.strip("()[] ").split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise UserError(f"setting '{where}' is '{value}'; it must be a list, such as 1,2,3")
        return tuple(_convert(item, options[0], where) for item in items if item != "")
    return _scalar(value, hint, where)


def _scalar(value: Any, hint: Any, where: str) -> Any:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    try:
        if hint is bool:
            return value if isinstance(value, bool) else words[str(value).lower()]
        if hint is Path:
            if value == "":  # Path("") is the current folder
                raise ValueError
            return Path(value)
        if isinstance(value, bool) and hint is not str:
            raise ValueError
        if hint is int and isinstance(value, float) and value != int(value):
            raise ValueError
        found = hint(value.strip() if isinstance(value, str) else value)
        if hint is float and math.isinf(found):  # no file of a run can hold it; `within` refuses NaN
            raise ValueError
        return found
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        kinds = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}
        raise UserError(f"setting '{where}' is '{value}'; it must be {kinds.get(hint, hint.__name__)}") from error

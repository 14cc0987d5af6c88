"""Values from constructors, tables and `key=value` words, checked by pydantic against declared types.

Options are frozen dataclasses with ranges and choices in their types. An unknown key, a wrong type or a value out of
range is a `UserError` of one line that names it.
"""

import ast
import dataclasses
import functools
import inspect
import json
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, cast, dataclass_transform

import pydantic.dataclasses
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from clipcil.errors import UserError, nearest, printable

T = TypeVar("T")

Share = Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1."""
Count = Annotated[int, Field(ge=0, le=2**53)]
Text = Annotated[str, Field(max_length=10_000)]

_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, Field))
def options(kind: type[T]) -> type[T]:
    """Class decorator: a frozen dataclass whose constructor checks the types, ranges and choices of its fields.

    Every field has a default and a docstring below it. Numbers and truth values may be given as words.

    Examples:
        >>> @options
        ... class Mine:
        ...     rank: Annotated[int, Field(ge=1)] = 8
        >>> Mine(rank="3")
        Mine(rank=3)
        >>> Mine(rank=0)
        Traceback (most recent call last):
        clipcil.errors.UserError: setting 'rank' is '0'; it should be greater than or equal to 1
    """
    config = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, validate_default=True)
    made: Any = pydantic.dataclasses.dataclass(frozen=True, config=config)(kind)
    checked = made.__init__

    @functools.wraps(checked)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        names = [field.name for field in dataclasses.fields(made)]
        by_name = dict(zip(names, args, strict=False))  # so that an error names the setting, not its position
        try:
            checked(self, *args[len(names) :], **by_name, **kwargs)
        except ValidationError as error:
            raise _refusal(error, "setting ", names) from error

    made.__init__ = init
    return cast(type[T], made)


def typed(value: Any, kind: Any, where: str = "") -> Any:
    """`value`, which JSON or TOML gave, as an instance of `kind`, without conversions between types.

    `kind` is any type that pydantic knows; `where` names the value in errors.

    Examples:
        >>> typed([1, 2], list[Count])
        [1, 2]
        >>> typed({"x": -1}, dict[str, Count])
        Traceback (most recent call last):
        clipcil.errors.UserError: 'x' is '-1'; it should be greater than or equal to 0
    """
    try:
        return _adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise _refusal(error, where=where) from error


def _refusal(error: ValidationError, what: str = "", known: Sequence[str] = (), where: str = "") -> UserError:
    """The first value that pydantic refused and what it should be, in one line."""
    first = error.errors(include_url=False)[0]
    name, shown = ".".join(map(str, (where, *first["loc"]) if where else first["loc"])), printable(first["input"])
    if first["type"] == "missing":
        return UserError(f"{what}'{name}' is missing")
    if first["type"] == "unexpected_keyword_argument":
        return UserError(f"there is no {what}'{name}'{nearest(name, known)}")
    cut = "…" if len(shown) > 60 else ""
    wanted = first["msg"].replace("Input should", "it should").removeprefix("Value error, ")
    return UserError(f"{what}'{name}' is '{shown[:60]}{cut}'; {wanted}")


def build(kind: type[T], values: Mapping[str, Any]) -> T:
    """An instance of dataclass `kind` with `values` over its defaults; nested tables fill nested dataclasses."""
    table = _table(kind(), values, "")
    return _validate(kind, {key: table[key] for key in values})  # a default may depend on what is given


def override(settings: T, values: Mapping[str, Any]) -> T:
    """A copy of the dataclass instance `settings` with `values` in place of some of its fields."""
    return _validate(type(settings), _table(settings, values, ""))


def _validate(kind: type[T], table: Mapping[str, Any]) -> T:
    try:
        return cast(T, _adapter(kind).validate_python(table))
    except ValidationError as error:
        raise _refusal(error, "setting ") from error


def _table(settings: Any, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Every field of `settings` with its value, or with the one in `values`."""
    hints = typing.get_type_hints(type(settings))
    table = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    for key, value in values.items():
        if key not in table:
            raise UserError(f"there is no setting '{where}{key}'{nearest(key, table)}")
        inner = table[key]
        if not dataclasses.is_dataclass(inner):
            table[key] = _read_word(value, hints[key], f"{where}{key}")
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):  # a Training for a TowerTraining
            table[key] = _table(inner, {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}, "")
        elif isinstance(value, Mapping):
            table[key] = _table(inner, value, f"{where}{key}.")
        else:
            first = f"{where}{key}.{dataclasses.fields(inner)[0].name}"
            raise UserError(f"setting '{where}{key}' is '{value}'; it has settings of its own, such as {first}")
    return table


def _read_word(value: Any, hint: Any, where: str) -> Any:
    """`value` as pydantic takes it: lists from "1,2", None from "none", the choice "1" from 1."""
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        if str(value) not in map(str, choices):
            raise UserError(f"setting '{where}' is '{value}'{nearest(str(value), map(str, choices))}")
        return next(choice for choice in choices if str(choice) == str(value))
    if not isinstance(value, str):
        return value
    if NoneType in choices and value.lower() == "none":
        return None
    if value == "" and Path in (hint, *choices):  # Path("") is the current folder
        raise UserError(f"setting '{where}' is ''; it must be a path")
    if typing.get_origin(hint) is tuple:
        return [item.strip() for item in value.strip("()[] ").split(",") if item.strip()]
    return value


def parse_words(words: Iterable[str]) -> dict[str, Any]:
    """`["stage1.lr=1e-4", "beta=0.1"]` → `{"stage1": {"lr": "1e-4"}, "beta": "0.1"}`."""
    result: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UserError(f"'{word}' is not a setting; write key=value, such as stage1.lr=1e-4")
        result[key.strip()] = value
    return nested(result)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"stage1.lr": 1e-4, "beta": 0.1}` → `{"stage1": {"lr": 1e-4}, "beta": 0.1}`."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        result = merge(result, {name: nested({rest: value}) if rest else value})
    return result


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `nested`.

    >>> flat({"stage1": {"lr": 1e-4}, "beta": 0.1})
    {'stage1.lr': 0.0001, 'beta': 0.1}
    """
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= {f"{key}.{name}": each for name, each in flat(value).items()}
        else:
            result[key] = value
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
    table: dict[str, Any] = _adapter(type(settings)).dump_python(settings, mode="json", exclude_none=True)
    return table


def field_docs(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, base classes included."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                value = getattr(getattr(after, "value", None), "value", None)
                if isinstance(after, ast.Expr) and isinstance(value, str):
                    docs[statement.target.id] = " ".join(value.split())
    return docs

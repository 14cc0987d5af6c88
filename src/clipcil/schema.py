"""Values from JSON and TOML files, checked against a declared type by pydantic."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from clipcil.errors import UserError, printable

if TYPE_CHECKING:
    from pydantic import ValidationError

Count = Annotated[int, Field(ge=0, le=2**53)]
Text = Annotated[str, Field(max_length=10_000)]


def typed(value: Any, kind: Any, where: str = "") -> Any:
    """`value` as an instance of `kind`, without conversions between types.

    Args:
        value: A value that JSON or TOML gave.
        kind: Any type that pydantic knows: scalars, lists, dataclasses, TypedDicts, models.
        where: Name of the value in errors.

    Raises:
        UserError: The value is not of this type; the line names the first wrong entry.

    Example:
        >>> typed([1, 2], list[Count])
        [1, 2]
        >>> typed({"x": -1}, dict[str, Count])
        Traceback (most recent call last):
        clipcil.errors.UserError: 'x' is '-1'; input should be greater than or equal to 0
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        raise UserError(explain(error, where)) from error


def explain(error: ValidationError, where: str = "") -> str:
    """The first entry that pydantic refused, its value, and what it must be, in one line."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in (*([where] if where else []), *first["loc"]))
    shown, wanted = printable(first["input"]), first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "missing":
        return f"'{place}' is missing"
    return f"'{place}' is '{shown[:60]}{'…' if len(shown) > 60 else ''}'; {wanted}"

"""Class names: readable names from those of folders and files, and which names mean the same class."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from clipcil.errors import UserError, printable

ANYTHING = ("folder", "parquet", "hub")
"""Datasets whose contents depend on their folder or repository; the others are the same everywhere."""
LONGEST = 300
"""Characters in a name. 77 tokens hold no more than this of any language; the tokenizer says the exact limit later."""
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
"""Zero-width letters and direction marks; not every format character of Unicode: tags make the flags of countries."""
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def clean_name(raw: str, *, camel: bool = False, hyphens: bool = False) -> str:
    """`aquarium_fish` → `aquarium fish`; with `camel`, `ApplyEyeMakeup` → `Apply Eye Makeup`; with `hyphens`,
    `Black-footed` → `Black footed`. White space and control characters become single spaces."""
    text = unicodedata.normalize("NFC", raw).replace("_", " ")
    if hyphens:
        text = text.replace("-", " ")
    if camel:
        text = _HUMP.sub(" ", text)
    text = "".join(" " if unicodedata.category(letter) == "Cc" else letter for letter in text)
    return " ".join(text.split())


def same_name(name: str) -> str:
    """A key that is equal for names that mean one class: in any case, with underscores or blanks, composed or not, with
    or without invisible letters such as a zero-width space.

    >>> same_name("Green_Apple") == same_name("green  apple") == same_name("green apple\u200b")
    True
    """
    return unicodedata.normalize("NFC", clean_name(_INVISIBLE.sub("", name)).casefold())


def need_text(name: object) -> str:
    """A class name that a caller gave, which must be text.

    Raises:
        UserError: It is something else, such as a number.
    """
    if not isinstance(name, str):
        raise UserError(f"class name {name!r} is of type {type(name).__name__}; give text, such as '{name}'")
    return name


def shorten(name: str, length: int = 60) -> str:
    """A name as a one-line message can show it."""
    return name if len(name) <= length else f"{name[:length]}… ({len(name)} characters)"


def check_template(template: str) -> str:
    """The sentence, which must have exactly one `{}`, for the class name, and no other brace."""
    rest = template.replace("{}", "", 1)
    if "{}" not in template or "{" in rest or "}" in rest:
        shown = shorten(printable(template))
        raise UserError(f"template '{shown}' must have {{}} once, where the class name goes, and no other brace")
    return template


def check_names(dataset: str, names: Sequence[str]) -> None:
    """Refuse names that CLIP's text tower cannot work with: empty, too long, or the same for two classes.

    CLIP's tokenizer puts everything in lower case, so names that differ only in case are the same text.
    """
    if not names:
        raise UserError(f"{dataset} has no classes")
    seen: dict[str, str] = {}
    for place, name in enumerate(names):
        if not same_name(need_text(name)):
            raise UserError(f"{dataset}: class {place} has an empty name; give it one")
        if len(name) > LONGEST:
            raise UserError(f"{dataset}: class name '{shorten(name)}' is too long for a prompt; shorten it")
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise UserError(f"{dataset}: class name '{shorten(printable(name))}' is not UTF-8; rename its folder")
        key = same_name(name)
        if key in seen:
            other = f"and '{shorten(seen[key])}' differ only in case, blanks or invisible letters"
            how = "occurs twice" if seen[key] == name else other
            raise UserError(
                f"{dataset}: class name '{shorten(name)}' {how}, so CLIP would see one text; rename or merge them"
            )
        seen[key] = name

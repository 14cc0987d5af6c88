"""Class names: readable names from those of folders and files, and which names mean the same class."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator

from clipcil.errors import UserError, printable

ANYTHING = ("folder", "parquet", "hub")
"""Datasets whose contents depend on their folder or repository; the others are the same everywhere."""
LONGEST_NAME = 300
"""Maximum characters of a name. 77 tokens never hold more, in any language; the tokenizer checks the exact limit."""
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


def folder_class(folder: str) -> str:
    """The class that a folder is named after; a number and a dot before it only sort the folders.

    >>> folder_class("001.Black_footed_Albatross"), folder_class("1.5_volts"), folder_class("2_wheelers")
    ('Black footed Albatross', '1.5 volts', '2 wheelers')
    """
    return clean_name(re.sub(r"^\d+\.[\s_]*(?=[^\W\d_])", "", folder))


def same_name(name: str) -> str:
    """A key that is equal for names that mean one class.

    Case, underscores, blanks, the form of accents and invisible letters make no difference: CLIP's tokenizer makes
    everything lower case, and a reader sees no difference in the rest.

    >>> same_name("Green_Apple") == same_name("green  apple") == same_name("green apple\u200b")
    True
    """
    return unicodedata.normalize("NFC", clean_name(_INVISIBLE.sub("", name)).casefold())


def need_text(name: object) -> str:
    """A class name that a caller gave, which must be text."""
    if not isinstance(name, str):
        raise UserError(f"class name {name!r} is of type {type(name).__name__}; give text, such as '{name}'")
    return name


def shorten(name: str, length: int = 60) -> str:
    """A name as a one-line message can show it."""
    return printable(name) if len(name) <= length else f"{printable(name[:length])}… ({len(name)} characters)"


def check_template(template: str) -> str:
    """The sentence, which must have exactly one `{}`, for the class name, and no other brace."""
    rest = template.replace("{}", "", 1)
    if "{}" not in template or "{" in rest or "}" in rest:
        raise UserError(f"template '{shorten(template)}' must have {{}} once, for the class name, and no other brace")
    return template


Template = Annotated[str, AfterValidator(check_template)]
"""An option: a sentence with `{}` in the place of the class name."""


def check_names(dataset: str, names: Sequence[str]) -> None:
    """Refuse names that CLIP cannot work with: empty, too long, or of one text for two classes (see `same_name`)."""
    if not names:
        raise UserError(f"{dataset} has no classes")
    seen: dict[str, int] = {}
    for place, name in enumerate(names):
        if not same_name(need_text(name)):
            raise UserError(f"{dataset}: class {place} has an empty name; give it one")
        if len(name) > LONGEST_NAME:
            raise UserError(f"{dataset}: class name '{shorten(name)}' is too long for a prompt; shorten it")
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise UserError(f"{dataset}: class name '{shorten(name)}' is not UTF-8; rename its folder")
        other = seen.setdefault(same_name(name), place)
        if other != place:
            both = f"'{shorten(names[other])}' and '{shorten(name)}'"
            raise UserError(f"{dataset}: class names {both} are one text to CLIP; rename or merge them")

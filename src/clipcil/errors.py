"""Errors meant for people: one line that says what was wrong, with which value, and what to do."""

import difflib
import shlex
import unicodedata
from collections.abc import Iterable

NAMES_SHOWN = 30
"""Maximum number of known names in a message."""


class UserError(Exception):
    """An error that the user can fix. The command line prints it as one line and exits with code 2.

    Examples:
        >>> import clipcil
        >>> try:
        ...     clipcil.load_clip("minni")
        ... except clipcil.UserError as error:
        ...     print(str(error)[:20])
        no backbone 'minni':
    """


class LostProcessError(UserError):
    """Another process of a run on several devices ended or does not answer."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the known name closest to `name`, or a list of known names.

    >>> nearest("castle", ["apple", "cat"]), nearest("aple", ["apple", "cat"])
    ('; known: apple, cat', "; did you mean 'apple'?")
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.65)
    if close:
        return f"; did you mean '{close[0]}'?"
    more = f", … ({len(names)} in all)" if len(names) > NAMES_SHOWN else ""
    return f"; known: {', '.join(names[:NAMES_SHOWN])}{more}" if names else ""


def first_line(error: BaseException) -> str:
    """The first non-empty line of the message that does not end in a colon, or the name of the error's type."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line[:160] for line in lines if line and not line.endswith(":")), type(error).__name__)


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun.

    >>> counted(1, "class", "classes"), counted(2, "picture")
    ('1 class', '2 pictures')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def quoted(path: object) -> str:
    """A path as it can be typed into a shell."""
    return shlex.quote(str(path))


def printable(value: object) -> str:
    r"""`value` as text that is safe to print. Control and direction characters, line breaks and undecodable bytes,
    which names of files and classes may hold, become escapes.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    text = str(value)
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter.encode("unicode_escape").decode() if _hidden(letter) else letter for letter in text)


def _hidden(letter: str) -> bool:
    joiner = letter in "\u200c\u200d"  # they hold emoji and letters of several scripts together
    return unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") and not joiner

"""Errors meant for people: one line that says what was wrong, with which value, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend. The command line prints it as one line and exits with code 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the known name closest to `name`, or the list of known names."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(names)}" if names else ""

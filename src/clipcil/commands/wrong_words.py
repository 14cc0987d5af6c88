"""Explains in one plain line what is wrong with the words of a command, from tyro's boxed message."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from clipcil.errors import nearest

NAME_INDENT = 6
"""How far a missing argument is indented in tyro's box; what explains it is indented further."""


def explain(boxed: str, words: Sequence[str], options: Collection[str]) -> str:
    """One line that says what to change.

    Args:
        boxed: What tyro printed.
        words: The words of the command, its name first.
        options: What the command takes: options such as `--seed`, and arguments such as `METHOD`; empty where there
            is no such command.
    """
    parts = sections(boxed)
    found = unknown_option(words, options) or word_too_many(parts) or missing(parts) or bad_value(parts, words)
    command = f"clipcil {words[0]}" if options else "clipcil"
    said = (found or flat(parts[1]) or "the command could not be read").rstrip(".")
    return f"{said}{'' if said.endswith('?') else ';'} {command} --help tells more"


def known_options(ask_for_help: Callable[[], object]) -> set[str]:
    """The options and arguments in the help that `ask_for_help` prints before it ends the process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        ask_for_help()
    arguments = re.findall(r"^│? *\[?([A-Z][A-Z_]+)…?\]?(?: |$)", printed.getvalue(), re.MULTILINE)
    return {*re.findall(r"--[a-z][\w-]*", printed.getvalue()), *arguments}


def sections(boxed: str) -> list[list[str]]:
    """Title, message and what follows, between tyro's rules; at least two parts. Frames may be drawn in ASCII."""
    parts: list[list[str]] = [[]]
    for line in re.sub(r"[│╭╮╰╯]", " ", boxed).splitlines():
        if title := re.fullmatch(r"\s*─ (.*?) ─+\s*", line):
            parts = [[title[1]], []]
        elif re.fullmatch(r"\s*(─{5,}|-{5,})\s*", line):
            parts.append([])
        elif line.strip():
            parts[-1].append(line.rstrip())
    return [*parts, [], []][: max(2, len(parts))]


def flat(lines: Sequence[str]) -> str:
    return " ".join(" ".join(lines).split())


def unknown_option(words: Sequence[str], options: Collection[str]) -> str:
    given = (word.partition("=")[0].replace("_", "-") for word in words[1:] if word.startswith("--"))
    unknown = next((word for word in given if word not in options), None) if options else None
    if unknown is None:
        return ""
    argument = unknown[2:].upper().replace("-", "_")
    if argument in options:
        return f"{words[0]} has no option {unknown}: give {argument} as a word of its own, without {unknown}"
    known = sorted(option for option in options if option.startswith("-"))
    return f"{words[0]} has no option {unknown}{nearest(unknown, known)}"


def word_too_many(parts: Sequence[Sequence[str]]) -> str:
    found = re.match(r"Unrecognized options: (.*)", flat(parts[1]))
    return f"unexpected words: {found[1]}" if found else ""


def missing(parts: Sequence[Sequence[str]]) -> str:
    text = flat(parts[1])
    if value := re.match(r"Missing value for argument '([^']+)'", text):
        name = value[1]
        return f"{name} needs a value" if name.startswith("-") else f"{name.upper()} is missing"
    if not text.startswith("Missing from"):
        return ""
    names = [line.strip() for line in parts[1] if len(line) - len(line.lstrip()) == NAME_INDENT]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} missing"


def bad_value(parts: Sequence[Sequence[str]], words: Sequence[str]) -> str:
    text = flat(parts[1])
    if choice := re.match(r"invalid choice '(.*)' for argument '([^']+)'\. Expected one of \(([^)]*)\)", text):
        known = ", ".join(re.findall(r"'([^']*)'", choice[3]))
        return f"{choice[2]} cannot be '{choice[1]}'; known: {known}"
    parsing = re.match(r"Error parsing (--[\w-]+)", text)
    if parsing is None:
        return ""
    flag = parsing[1]
    after = [later for word, later in pairwise(words) if word == flag]
    after += [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    helps = next((flat(part[2:]) for part in parts[2:] if flat(part).startswith("Argument helptext")), "")
    return f"{flag} cannot be '{after[0] if after else ''}'" + (f"; it is: {helps}" if helps else "")

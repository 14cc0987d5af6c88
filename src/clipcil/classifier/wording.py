"""Wording of messages: counted nouns, and lines that wrap at the width of the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, TextIO

from clipcil.classifier.scoring import ENOUGH, Calibration, Evaluation
from clipcil.errors import printable

if TYPE_CHECKING:
    from rich.table import Table


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun.

    Example:
        >>> counted(1, "class", "classes"), counted(2, "picture")
        ('1 class', '2 pictures')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def say(text: str, out: TextIO | None = None) -> None:
    """Print a sentence; on a terminal it wraps between words, in a file or a pipe it stays one line."""
    out = out or sys.stdout
    text = printable(text)
    if out.isatty():
        width = max(20, shutil.get_terminal_size().columns)
        text = textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print(text, file=out)


def print_table(table: Table) -> None:
    """Print a table with its cells as they are: `:dog:` in a name is no emoji, and a long one is not cut off."""
    from rich.console import Console

    for column in table.columns:
        column.overflow = "fold"
    Console(highlight=False, markup=False, emoji=False).print(table)


def accuracy_sentence(found: Evaluation, classes: int, how: str, measured: int | None = None) -> str:
    """`accuracy over all 5 classes: 93.3 % (95% interval 79 to 98 %), measured on 30 pictures held out`.

    `measured`: the number of classes that there were pictures of, where that may be fewer.
    """
    low, high = found.interval
    over = "" if classes == 1 else "all " if measured in (None, classes) else f"{measured} of "
    return (
        f"accuracy over {over}{counted(classes, 'class', 'classes')}: {found.accuracy or 0:.1%} (95% interval"
        f" {low:.0%} to {high:.0%}), measured on {counted(found.pictures, 'picture')}{how}"
    )


def unknown_sentence(how: Calibration) -> str:
    """When a picture is called "none of these", and how often that is a false alarm."""
    share = f"{how.false_alarms or 0:.1%} of new pictures of known classes"
    if how.threshold is None:
        return f"nothing is called 'none of these': {why_never_unknown(how)}"
    if how.novelty is not None:
        return f"'none of these' where a picture is unlike every class; to be expected for {share}"
    return f"'none of these' where the likeliest class is below {how.threshold:.1%}; to be expected for {share}"


def why_never_unknown(how: Calibration) -> str:
    """Why there is no threshold for "none of these"."""
    few = how.pictures < ENOUGH
    return "too few pictures are kept for evaluation" if few else "the model knows one class"


def confusion_sentence(found: Evaluation, most: int = 3) -> str:
    """`most often confused: lynx mistaken for cat (4 pictures), …`."""
    pairs = (f"{c.true} mistaken for {c.guess} ({counted(c.pictures, 'picture')})" for c in found.confused[:most])
    return f"most often confused: {', '.join(pairs)}"

"""Help that wraps between words at the width of the terminal."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, TextIO


class WrappingStream:
    """A text stream that folds long lines; the boxes that tyro draws fit already and stay as they are."""

    def __init__(self, out: TextIO, width: int) -> None:
        self._out, self._width = out, width

    def write(self, text: str) -> int:
        return self._out.write("\n".join(self._fold(line) for line in text.split("\n")))

    def _fold(self, line: str) -> str:
        if len(line) <= self._width or line.lstrip().startswith(("│", "╭", "╰", "|", "+", "\033")):
            return line
        line = line.replace(",", ", ") if line.startswith("usage:") else line  # the list of commands
        indent = " " * (2 * (len(line) - len(line.lstrip())))  # an example goes on further in than it began
        return textwrap.fill(
            line, self._width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


@contextlib.contextmanager
def wrapped_help() -> Iterator[None]:
    """Fold what is printed inside the block."""
    stream: Any = WrappingStream(sys.stdout, max(20, shutil.get_terminal_size().columns))
    with contextlib.redirect_stdout(stream):
        yield

"""What a run prints: a live table and progress bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from clipcil.errors import printable


class Display:
    """Prints nothing. The base class of the displays that do, and the default in Python."""

    def start(self, title: str, tasks: int) -> None:
        """A run begins."""

    def tell(self, line: str) -> None:
        """Print a line."""

    def stage(self, name: str, steps: int) -> None:
        """A stage of `steps` steps begins, 0 where the number is not known; no name: nothing is under way."""

    def advance(self) -> None:
        """A step of the stage is done."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Pictures are being preprocessed or encoded."""

    def row(self, row: Sequence[str], header: Sequence[str]) -> None:
        """A task is learnt and evaluated."""

    def stop(self) -> None:
        """The run has ended or failed."""


class PlainDisplay(Display):
    """Prints a line per task, for logs and pipes."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True, markup=False)
        self._header = False

    def start(self, title: str, tasks: int) -> None:
        self._header = False
        self.console.print(printable(title), markup=False)

    def tell(self, line: str) -> None:
        self.console.print(printable(line), markup=False)

    def row(self, row: Sequence[str], header: Sequence[str]) -> None:
        widths = [max(8, len(name)) for name in header]
        if not self._header:
            self._header = True
            self.console.print("  ".join(name.rjust(width) for name, width in zip(header, widths, strict=True)))
        self.console.print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


class LiveDisplay(Display):
    """A table with a row per task, a progress bar for the tasks and one for the current stage."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(markup=False)
        columns = (
            TextColumn("{task.description:<28}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=self.console)
        self._table: Table | None = None
        self._live: Live | None = None
        self._tasks: Any = None
        self._stage: Any = None

    def start(self, title: str, tasks: int) -> None:
        self.console.print(printable(title), markup=False)
        self._tasks = self._bars.add_task("tasks", total=tasks)
        self._stage = self._bars.add_task("", total=None)
        self._live = Live(self._bars, console=self.console, refresh_per_second=8)
        self._live.start()

    def tell(self, line: str) -> None:
        self.console.print(printable(line), markup=False)

    def stage(self, name: str, steps: int) -> None:
        if self._stage is not None:
            self._bars.reset(self._stage, description=name, total=steps or None)

    def advance(self) -> None:
        if self._stage is not None:
            self._bars.advance(self._stage)

    def progress(self, what: str, done: int, total: int) -> None:
        if self._stage is not None:
            self._bars.update(self._stage, description=f"{what} pictures", completed=done, total=total)

    def row(self, row: Sequence[str], header: Sequence[str]) -> None:
        if self._table is None:
            self._table = Table(*header, box=None)
            for column in self._table.columns:
                column.justify = "right"
        self._table.add_row(*row)
        if self._live is not None:
            self._bars.advance(self._tasks)
            self._live.update(Group(self._table, self._bars))

    def stop(self) -> None:
        if self._live is not None:
            self._live.update(self._table or "")
            self._live.stop()
            self._live = None


def open_display(quiet: bool = False) -> Display:
    """The display for where the output goes: a terminal, a file or a pipe, or nowhere."""
    if quiet:
        return Display()
    console = Console(markup=False)
    return LiveDisplay(console) if console.is_terminal else PlainDisplay()

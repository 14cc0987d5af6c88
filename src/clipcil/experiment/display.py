"""Showing the progress of a run: nothing, a line per task, a live table in a terminal, or a bar in a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from clipcil.errors import printable
from clipcil.training.notebook import NotebookBar, in_notebook
from clipcil.training.trainer import Callback


class Display(Callback):
    """Prints nothing. The base class of the displays that do, and the default in Python."""

    def start(self, title: str, tasks: int) -> None:
        """A run begins."""

    def tell(self, line: str) -> None:
        """Print a line."""

    def bar(self, name: str, total: int) -> None:
        """A stage or phase of `total` steps begins, 0 where the number is not known; no name: nothing is under way."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Pictures are being preprocessed or encoded."""

    def row(self, row: Sequence[str], header: Sequence[str]) -> None:
        """A task is learnt and evaluated."""

    def stop(self) -> None:
        """The run has ended or failed."""

    def begin_stage(self, stage: str, epochs: int, steps: int) -> None:
        self.bar(stage, epochs * steps)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.bar(name, 0)
        try:
            yield
        finally:
            self.bar("", 0)


class PlainDisplay(Display):
    """Prints a line per task, for logs and pipes."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True, markup=False)
        self._header = False

    def start(self, title: str, tasks: int) -> None:
        self._header = False
        self.tell(title)

    def tell(self, line: str) -> None:
        self.console.print(printable(line), markup=False)

    def row(self, row: Sequence[str], header: Sequence[str]) -> None:
        widths = [max(8, len(name)) for name in header]
        for cells in [row] if self._header else [header, row]:
            self.console.print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
        self._header = True


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
        self.tell(title)
        self._tasks = self._bars.add_task("tasks", total=tasks)
        self._stage = self._bars.add_task("", total=None)
        self._live = Live(self._bars, console=self.console, refresh_per_second=8)
        self._live.start()

    def tell(self, line: str) -> None:
        self.console.print(printable(line), markup=False)

    def bar(self, name: str, total: int) -> None:
        if self._stage is not None:
            self._bars.reset(self._stage, description=name, total=total or None)

    def step(self, stage: str, epoch: int, step: int, loss: Tensor, rate: float) -> None:
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


class NotebookDisplay(PlainDisplay):
    """A line per task, and a bar for the current stage."""

    def __init__(self) -> None:
        super().__init__()
        self._bar, self._stage = NotebookBar(), ("", 0, 0)

    def bar(self, name: str, total: int) -> None:
        self._stage = (name, 0, total)
        if name:
            self._bar.show(*self._stage)
        else:
            self._bar.clear()

    def step(self, stage: str, epoch: int, step: int, loss: Tensor, rate: float) -> None:
        name, done, total = self._stage
        self._stage = (name, done + 1, total)
        self._bar.show(*self._stage)

    def progress(self, what: str, done: int, total: int) -> None:
        self._bar.show(f"{what} pictures", done, total)

    def stop(self) -> None:
        self._bar.clear()


def open_display(quiet: bool = False) -> Display:
    """The display of a command: for a terminal, for a file or a pipe, or none."""
    if quiet:
        return Display()
    console = Console(markup=False)
    return LiveDisplay(console) if console.is_terminal else PlainDisplay()


def default_display() -> Display:
    """The display in Python: a progress bar in a notebook, nothing elsewhere."""
    return NotebookDisplay() if in_notebook() else Display()

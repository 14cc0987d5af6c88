"""Callbacks of a run: the seconds of its phases, the log of its steps, and the display of its progress.

A display shows nothing, a line per task, in a terminal with progress bars below, or a bar in a notebook.
"""

from __future__ import annotations

import html
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from clipcil.errors import UserError, printable
from clipcil.settings import Count, Text, typed
from clipcil.storage import open_log, parse_json, read_bytes
from clipcil.training.trainer import Callback

if TYPE_CHECKING:
    from clipcil.experiment.results import Results

HEADER = ("task", "classes", "A_k", "weighted", "newest", "first", "seconds")
"""The columns of the line that is printed for each task."""

BAR_PAUSE = 0.1
"""Seconds between two updates of the bar in a notebook: each one is a message to the browser."""


class Timer(Callback):
    """Adds up the seconds of stages and phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun: dict[str, float] = {}

    def begin_stage(self, stage: str, epochs: int = 0, steps: int = 0) -> None:
        self._begun[stage] = time.perf_counter()

    def end_stage(self, stage: str) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - self._begun[stage]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.begin_stage(name)
        try:
            yield
        finally:
            self.end_stage(name)


@dataclass
class Step:
    """A line of `steps.jsonl`."""

    task: Count
    stage: Text
    epoch: Count
    step: Count
    loss: float
    rate: float


class StepLog(Callback):
    """`steps.jsonl`: a line for every training step.

    Losses stay on the device until the stage ends, so that a step never waits for them. The log of a resumed run reads
    as if it had never stopped: lines after `size` are removed before new ones are added. `tell` is called with a line
    for the user where lines were lost.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.path, self.tell = path, tell
        self.size = 0
        """Bytes of the log that belong to the run."""
        self.task = 0
        self._waiting: list[tuple[str, int, int, Tensor, float]] = []

    def step(self, stage: str, epoch: int, step: int, loss: Tensor, rate: float) -> None:
        self._waiting.append((stage, epoch, step, loss, rate))

    def end_stage(self, stage: str) -> None:
        self.write()

    def read(self) -> list[Step]:
        """The steps so far; only those before the first line that is damaged."""
        steps: list[Step] = []
        with suppress(UserError):
            for line in read_bytes(self.path)[: self.size].splitlines():
                steps.append(typed(parse_json(line, str(self.path)), Step))
        return steps

    def write(self) -> None:
        """Write the lines of all steps since the last call."""
        losses = torch.stack([row[3].float() for row in self._waiting]).tolist() if self._waiting else []
        lines = [
            {"task": self.task, "stage": name, "epoch": epoch, "step": step, "loss": loss, "rate": rate}
            for (name, epoch, step, _, rate), loss in zip(self._waiting, losses, strict=True)
        ]
        self._waiting = []
        with open_log(self.path) as file:
            there = file.seek(0, os.SEEK_END)
            if there < self.size:  # the results do not depend on the log
                self.tell(f"{self.path} was removed or truncated; the losses before this point are lost")
            file.truncate(min(self.size, there))
            file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
            self.size = file.seek(0, os.SEEK_END)


def peak_megabytes() -> float:
    """The most memory this process has held since it began."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux, bytes on macOS
    return round(used / (1024**2 if sys.platform == "darwin" else 1024), 1)


class Display(Callback):
    """Shows nothing. The base class of the displays, and the default in Python."""

    _stage = ("", 0, 0)
    """Name of the current stage, steps done, and their total number."""

    def tell(self, line: str) -> None:
        """Print a line."""

    def show(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` are done, 0 where the number is not known; no text: nothing is under way."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Pictures are being preprocessed or encoded."""
        self.show(f"{what} pictures", done, total)

    def begin_stage(self, stage: str, epochs: int, steps: int) -> None:
        self._stage = (stage, 0, epochs * steps)
        self.show(*self._stage)

    def step(self, stage: str, epoch: int, step: int, loss: Tensor, rate: float) -> None:
        name, done, total = self._stage
        self._stage = (name, done + 1, total)
        self.show(*self._stage)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.show(name, 0, 0)
        try:
            yield
        finally:
            self.show("", 0, 0)


class PlainDisplay(Display):
    """Prints a line per task, for logs and pipes."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True, markup=False)
        self._has_header = False

    def begin_run(self, experiment: Any, folder: Path) -> None:
        self.tell(repr(experiment))
        self._has_header, self._since = False, time.perf_counter()

    def tell(self, line: str) -> None:
        self.console.print(printable(line), markup=False)

    def end_task(self, results: Results) -> None:
        seconds, self._since = time.perf_counter() - self._since, time.perf_counter()
        count = len(results.records)
        numbers = (results.last, results.last_weighted, results.matrix[-1, -1], results.matrix[-1, 0])
        cells = [f"{count}/{len(results.sizes)}", str(sum(results.sizes[:count]))]
        cells += [*(f"{number:.2f}" for number in numbers), f"{seconds:.1f}"]
        for line in [cells] if self._has_header else [HEADER, cells]:
            self.console.print("  ".join(cell.rjust(8) for cell in line))
        self._has_header = True


class LiveDisplay(PlainDisplay):
    """A line per task, and below it a progress bar for the tasks and one for the current stage."""

    def __init__(self) -> None:
        super().__init__(Console(highlight=False, markup=False))
        columns = (
            TextColumn("{task.description:<28}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=self.console, transient=True)
        self._tasks, self._bar = self._bars.add_task("tasks", total=None), self._bars.add_task("", total=None)

    def begin_run(self, experiment: Any, folder: Path) -> None:
        super().begin_run(experiment, folder)
        self._bars.reset(self._tasks, total=len(experiment))
        self._bars.start()

    def show(self, what: str, done: int, total: int) -> None:
        if not done:
            self._bars.reset(self._bar)  # the time shown starts again at 0
        self._bars.update(self._bar, description=what, completed=done, total=total or None)

    def end_task(self, results: Results) -> None:
        super().end_task(results)
        self._bars.update(self._tasks, completed=len(results.records))

    def end_run(self) -> None:
        self._bars.stop()


class NotebookDisplay(PlainDisplay):
    """A line per task, and a bar for the current stage in the output of the cell. Needs nothing but IPython itself."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None
        self._updated = 0.0

    def show(self, what: str, done: int, total: int) -> None:
        if not what:
            self.end_run()
        elif done in (0, total) or time.monotonic() - self._updated >= BAR_PAUSE:
            self._updated = time.monotonic()
            count, place = (f" {done}/{total}", f' max="{total}" value="{done}"') if total else ("", "")
            self._put(f"<progress{place}></progress> {html.escape(what)}{count}")

    def end_run(self) -> None:
        if self._handle is not None:
            self._put("")

    def _put(self, page: str) -> None:
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(page), display_id=True)
        else:
            self._handle.update(HTML(page))


def in_notebook() -> bool:
    """Whether an IPython kernel runs this code: Jupyter, Colab, or the notebook of an editor."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


@contextmanager
def notebook_progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """`on_progress(stage, done, total)` that shows a bar in a notebook until the block ends; None elsewhere."""
    display = NotebookDisplay()
    try:
        yield display.show if in_notebook() else None
    finally:
        display.end_run()


def open_display(quiet: bool = False) -> Display:
    """The display of a command: for a terminal, for a file or a pipe, or none."""
    if quiet:
        return Display()
    return LiveDisplay() if Console().is_terminal else PlainDisplay()


def default_display() -> Display:
    """The display in Python: a progress bar in a notebook, nothing elsewhere."""
    return NotebookDisplay() if in_notebook() else Display()

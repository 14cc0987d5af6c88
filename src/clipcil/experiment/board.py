"""A live table of the runs of a grid: waiting, running with its task and accuracy, done, failed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from clipcil.errors import UserError
from clipcil.experiment.evaluate import Record
from clipcil.experiment.grid import Planned
from clipcil.experiment.results import Results
from clipcil.reading import read_json

STATES = ("running", "failed", "done", "waiting")
"""The order in which runs are shown where there are too many for the screen."""


class Board:
    """What is known of every run. Progress is read from the checkpoints, wherever the run takes place."""

    def __init__(self, runs: Sequence[Planned]) -> None:
        self.runs = runs
        self.ended: dict[Path, str] = {}
        """`done` or `failed`, for the runs that have ended."""
        self._read: dict[Path, tuple[str, str]] = {}

    def show(self, console: Console) -> AbstractContextManager[Live]:
        """The table on a terminal, renewed every second; lines printed meanwhile appear above it."""
        return Live(get_renderable=lambda: self.table(console.height - 4), console=console, refresh_per_second=1)

    def table(self, most: int = 1000) -> Table:
        """The table now, with at most `most` rows."""
        rows = [(self.state(run), run, *self.progress(run)) for run in self.runs]
        counts = {state: sum(row[0] == state for row in rows) for state in STATES}
        title = ", ".join(f"{count} {state}" for state, count in counts.items())
        # A method may stand there with several class orders and numbers of tasks: rows that look the same say nothing.
        more = [key for key in ("tasks", "order") if len({getattr(run.spec, key) for run in self.runs}) > 1]
        heads = ("run", "data", *more, "seed", "state", "task", "A_k")
        table = Table(*heads, title=title, title_justify="left", box=None)
        for state, run, task, accuracy in sorted(rows, key=lambda row: STATES.index(row[0]))[: max(1, most)]:
            own = (str(getattr(run.spec, key) or "") for key in more)
            table.add_row(run.label, run.spec.data, *own, str(run.spec.seed), state, task, accuracy)
        return table

    def state(self, run: Planned) -> str:
        """waiting, running, done or failed."""
        begun = (run.folder / "config.toml").is_file()
        return self.ended.get(run.folder, "running" if begun else "waiting")

    def progress(self, run: Planned) -> tuple[str, str]:
        """The tasks learnt and the accuracy after them, from the newest checkpoint; empty before the first."""
        newest = max((run.folder / "checkpoint").glob("task-????.json"), default=None)
        if newest is None:
            return "", ""
        if newest not in self._read:
            try:
                facts = read_json(newest)
                records = [Record(**record) for record in facts["records"]]
                results = Results({}, [], facts["sizes"], records, [], [])
                self._read[newest] = (str(len(records)), f"{results.last:.2f}")
            except (UserError, LookupError, TypeError, ValueError):  # being replaced just now, or damaged
                return "", ""
        return self._read[newest]

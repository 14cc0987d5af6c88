"""What every benchmark shares: timing both sides in turn, comparing their results, one row of the table."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

HEADER = ("", "step", "peers' way", "ours", "result", "goal", "", "error")


@dataclass
class Row:
    """One line of the table."""

    name: str
    """Which benchmark: P1 … P9 of the list of goals, S… for the smaller ones beside it."""
    step: str
    theirs: str
    ours: str
    result: str
    """The figure that the goal is about."""
    goal: str = ""
    met: bool | None = None
    """Whether the goal is reached; None where there is none."""
    error: float | None = None
    """Largest difference between the two results, relative to the largest entry."""
    tolerance: float | None = None
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    """Every number behind the line, for the JSON."""

    @property
    def passed(self) -> bool | None:
        """A goal does not count as reached if both sides do not give the same."""
        same = self.error is None or self.tolerance is None or self.error <= self.tolerance
        if self.met is None:
            return None if self.error is None else same
        return self.met and same

    def cells(self) -> tuple[str, ...]:
        mark = {True: "pass", False: "MISS", None: ""}[self.passed]
        error = "" if self.error is None else f"{self.error:.0e} ≤ {self.tolerance:.0e}"
        return (self.name, self.step, self.theirs, self.ours, self.result, self.goal, mark, error)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


def alternate(sides: Mapping[str, Callable[[], object]], repeats: int, warm_up: bool = True) -> dict[str, float]:
    """Median seconds of each side. The sides take turns, so that a busy moment of the machine falls on all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + warm_up):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


@contextmanager
def stopwatch(into: dict[str, float], name: str) -> Any:
    """Add the seconds spent inside to `into[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        into[name] = into.get(name, 0.0) + time.perf_counter() - start


def difference(ours: Tensor, theirs: Tensor) -> float:
    """max |a − b| / max |b|; infinite where the shapes differ or a NaN stands."""
    if ours.shape != theirs.shape:
        return float("inf")
    apart = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-300))
    return apart if apart == apart else float("inf")


def duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def versus(name: str, step: str, seconds: Mapping[str, float], at_least: float | None = None, **rest: Any) -> Row:
    """A row that compares the seconds of `theirs` with those of `ours`."""
    ratio = seconds["theirs"] / seconds["ours"]
    goal: dict[str, Any] = {} if at_least is None else {"goal": f"≥{at_least:g}×", "met": ratio >= at_least}
    details = {"seconds": dict(seconds), "ratio": ratio} | rest.pop("details", {})
    theirs, ours = duration(seconds["theirs"]), duration(seconds["ours"])
    return Row(name, step, theirs, ours, f"{ratio:.1f}×", details=details, **goal, **rest)


def machine() -> dict[str, Any]:
    """The machine and versions that the figures depend on."""
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "load before": round(os.getloadavg()[0], 2),
    }


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, notes under it."""
    cells = [HEADER, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADER))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    notes = [f"- {row.name} {row.step}: {row.note}" for row in rows if row.note]
    return "\n".join([*lines, "", *notes])

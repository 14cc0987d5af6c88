"""The parts that all benchmarks share: timing two sides in turn, comparing their results, keeping and showing rows."""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipcil.clip import layers
from clipcil.errors import UserError
from clipcil.storage import read_json
from reproduce.claims import markdown_table

HEAD = ("", "step", "peers' way", "ours", "result", "goal")


@dataclass
class Row:
    """One line of the table."""

    name: str
    """Which benchmark: P… for the list of goals, S… for the smaller ones beside it."""
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
        """A goal counts as reached only if both sides give the same result."""
        same = self.error is None or self.tolerance is None or self.error <= self.tolerance
        if self.met is None:
            return None if self.error is None else same
        return self.met and same

    def cells(self) -> list[str]:
        """The cells of this line under `HEAD`."""
        result = self.result + ": **missed**" * (self.passed is False)
        return [self.name, self.step, self.theirs, self.ours, result, self.goal]

    def as_dict(self) -> dict[str, Any]:
        """Every field and the verdict, for the JSON."""
        return asdict(self) | {"passed": self.passed}


@contextmanager
def usual_products() -> Iterator[None]:
    """Inside, linear layers multiply by torch's own BLAS on every processor, as the programs of others do."""
    before = layers.blas_is_slow
    layers.blas_is_slow = lambda: False  # type: ignore[assignment]
    try:
        yield
    finally:
        layers.blas_is_slow = before


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


def difference(ours: Tensor, theirs: Tensor) -> float:
    """max |a − b| / max |b|; infinite if the shapes differ or a value is NaN."""
    if ours.shape != theirs.shape:
        return float("inf")
    apart = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-300))
    return apart if apart == apart else float("inf")


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of all numbers in the tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def duration(seconds: float) -> str:
    """Seconds with a unit: `57.8 ms`."""
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
    notes = [f"- {row.name} {row.step}: {row.note}" for row in rows if row.note]
    return "\n".join([markdown_table(HEAD, [row.cells() for row in rows]), "", *notes])


def speed_table(folder: Path, compared: bool = False) -> str:
    """A line for each step, P before S and by number, and under it the machines that were measured.

    A later file (by name) replaces the rows that it measures again.

    Args:
        folder: Where the measurements are kept.
        compared: Only the steps that have a goal and are compared with the peers' way.
    """
    found: dict[tuple[str, str], tuple[Row, Path]] = {}
    machines: dict[Path, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        kept = read_json(path)
        machines[path] = kept["machine"]
        if kept["machine"]["quick"]:
            raise UserError(f"{path} was made with --quick, whose sizes say nothing about speed; measure again without")
        for row in kept["rows"]:
            row.pop("passed")
            key = row["name"], row["step"]
            found.pop(key, None)
            found[key] = Row(**row), path
    if not found:
        raise UserError(f"{folder} has no measurement; `python -m benchmarks --json {folder}/NAME.json` makes one")
    rows = [(row, path) for row, path in found.values() if not compared or (row.theirs and row.goal)]
    measured = []
    for path, machine in machines.items():
        own = dict.fromkeys(row.name for row, place in rows if place == path)
        which = "" if len({place for _, place in rows}) == 1 else f"{', '.join(own)}: "
        threads = f"{machine['threads']} thread{'s' * (machine['threads'] != 1)} on {machine['cores']} cores"
        measured += [
            f"{which}{threads} with {machine['instructions']} instructions, load before {machine['load before']},"
            f" torch {machine['torch']}."
        ] * bool(own)
    rows.sort(key=lambda pair: (pair[0].name[0], int(pair[0].name[1:])))
    return "\n".join([markdown_table(HEAD, [row.cells() for row, _ in rows]), "", *measured])

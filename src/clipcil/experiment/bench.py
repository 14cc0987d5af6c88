"""A grid of runs: finished runs are reused, a failed run is reported, and the others continue."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from clipcil.errors import UserError
from clipcil.experiment.board import Board
from clipcil.experiment.display import Display
from clipcil.experiment.finished import FinishedRuns
from clipcil.experiment.grid import Planned
from clipcil.experiment.on_ray import on_ray
from clipcil.experiment.results import NUMBERS
from clipcil.experiment.spec import Grid
from clipcil.experiment.workers import in_processes, in_this_process
from clipcil.files import open_log
from clipcil.reading import MissingFileError, parse_json, read_bytes
from clipcil.report.compare import Group, MeanStd, group_runs
from clipcil.report.console import Line
from clipcil.report.runs import RunResult

RESULTS = "results.jsonl"
Key = tuple[str, str, int | None]
"""Label, dataset and number of tasks."""


@dataclass(frozen=True)
class Finished:
    """A run of the grid and how it ended."""

    planned: Planned
    result: RunResult | None
    error: str = ""


@dataclass(frozen=True)
class Point:
    """A point of a sweep: one value on one dataset, over the runs that went well."""

    data: str
    value: str
    last: MeanStd
    average: MeanStd
    seconds: float
    runs: int


def run_grid(
    planned: Sequence[Planned],
    out: Path,
    tell: Callable[[str], None] = lambda line: None,
    make_display: Callable[[], Display] = Display,
    grid: Grid | None = None,
    console: Console | None = None,
) -> list[Finished]:
    """Do every run that is not done yet; a run that was stopped continues from its checkpoint.

    Args:
        planned: The runs; those with the same folder are one run.
        out: Folder of the grid. Each run that ends adds a line to its `results.jsonl`.
        tell: Called with a line for each run that ends.
        make_display: Makes the display of a run, where runs are done in this process.
        grid: How runs are done: one after the other, in several processes, or on Ray. Default: one after the other.
        console: A terminal for the live table of runs that are done at the same time. Default: none.

    Returns:
        How each of `planned` ended, in the same order.
    """
    grid, runs = grid or Grid(), distinct(planned)
    known = FinishedRuns(grid.kept)
    endings = _Endings(runs, out, known, tell)
    for line in on_other_devices(runs, known):
        tell(f"note: {line}")
    todo = []
    for run in runs:
        if result_of(run, known) is None:
            todo.append(run)
        else:
            endings.add(run, "", "done before")
    together = grid.jobs > 1 or grid.on == "ray"
    if grid.on == "ray":
        doing = on_ray(todo, grid)
    else:
        doing = in_processes(todo, grid.jobs, tell) if together else in_this_process(todo, make_display)
    try:
        with endings.board.show(console) if console is not None and together else nullcontext(), closing(doing):
            for run, error in doing:
                endings.add(run, error, "done")
        for run in runs:  # what another bench in this folder was doing may be done by now
            if endings.by_folder[run.folder].result is None and result_of(run, known) is not None:
                endings.add(run, "", "done by another process")
    except KeyboardInterrupt as stop:
        counts = f"stopped after {len(endings.by_folder)} of {len(runs)} runs"
        raise KeyboardInterrupt(f"{counts}; the same command continues") from stop
    return [replace(endings.by_folder[each.folder], planned=each) for each in planned]


class _Endings:
    """How the runs of a grid ended. Each ending is told, added to the log and shown on the board."""

    def __init__(self, runs: Sequence[Planned], out: Path, known: FinishedRuns, tell: Callable[[str], None]) -> None:
        self.board, self.by_folder = Board(runs), dict[Path, Finished]()
        self._log, self._known, self._tell = ResultLog(out / RESULTS), known, tell

    def add(self, run: Planned, error: str, state: str) -> None:
        """A run has ended: with an error, or well, and then `state` says when."""
        result = result_of(run, self._known) if not error else None
        if result is None and not error:
            error = "files that it names have changed since it was begun, or its results cannot be read; name another"
            error += " folder with --out"
        self.by_folder[run.folder] = Finished(run, result, error)
        self.board.ended[run.folder] = "done" if result else "failed"
        self._log.add(run, result, error)
        if result is None:
            self._tell(f"{self._name(run)}: FAILED: {error}")
        else:
            numbers = f"A_B {result.last:.2f}, Ā {result.average:.2f}, {result.seconds:.1f} s"
            self._tell(f"{self._name(run)}: {numbers} ({state})")

    def _name(self, run: Planned) -> str:
        """Its place in the grid and what it is; class order and tasks only where the grid has several."""
        runs, spec = self.board.runs, run.spec
        order = f", {spec.order}" if len({each.spec.order for each in runs}) > 1 else ""
        tasks = f" in {spec.tasks} tasks" if len({each.spec.tasks for each in runs}) > 1 else ""
        return f"[{runs.index(run) + 1}/{len(runs)}] {run.label} on {spec.data}{tasks}{order}, seed {spec.seed}"


def distinct(planned: Sequence[Planned]) -> list[Planned]:
    """Each run once: two rows of a table may be the same run."""
    found: dict[Path, Planned] = {}
    for each in planned:
        found.setdefault(each.folder, each)
    return list(found.values())


def result_of(planned: Planned, known: FinishedRuns) -> RunResult | None:
    """The results of a run that is finished; None where it is not, or cannot be run."""
    return None if planned.problem else known.find(planned.folder, planned.table)


def on_other_devices(planned: Sequence[Planned], known: FinishedRuns) -> list[str]:
    """A line for each device on which runs of the grid are kept that were asked for on another, and how to use them.

    The device is a part of what a run is: `auto` finds none of the runs of a CPU on a machine with a GPU.
    """
    runs = [each for each in distinct(planned) if not each.problem]
    found = Counter(known.other_device(each.folder, each.table) for each in runs)
    asked = ", ".join(sorted({each.spec.device for each in runs}))
    return [
        f"{count} of the runs are kept from device {device} and are not used here, where the device is {asked};"
        f" --device {device} uses them, and does the rest there"
        for device, count in sorted(found.items())
        if device
    ]


def states_of(planned: Sequence[Planned], known: FinishedRuns) -> dict[Key, Counter[str]]:
    """How many runs of each label on each dataset are finished, begun, waiting, or cannot be run; nothing is run."""
    found: dict[Key, Counter[str]] = {}
    for each in planned:
        spec = each.spec
        if each.problem:
            state = "cannot be run"
        elif result_of(each, known) is not None:
            state = "finished"
        else:
            state = "begun" if (each.folder / "config.toml").is_file() else "waiting"
        found.setdefault((each.label, spec.data, spec.tasks), Counter())[state] += 1
    return found


def lines_of(finished: Sequence[Finished], table: str = "") -> list[Line]:
    """A line of the table for each label on each dataset, in the order of the grid."""
    lines = []
    for (label, data, _), members, group in _together(finished):
        paper = None
        if group is not None:
            paper = group.paper_result(table if table != "sensitivity" else "") or group.paper_result()
        tasks = group.first.tasks if group else members[0].planned.spec.tasks
        lines.append(Line(label, data, tasks, group, paper, sum(member.result is None for member in members)))
    return lines


def points_of(finished: Sequence[Finished]) -> list[Point]:
    """A point for each dataset and value with at least one run that went well, in the order of the sweep."""
    return [
        Point(data, value, group.last, group.average, group.seconds, len(group.runs))
        for (value, data, _), _, group in _together(finished)
        if group is not None
    ]


def _together(finished: Sequence[Finished]) -> list[tuple[Key, list[Finished], Group | None]]:
    """Runs of one label on one dataset in one number of tasks, and the group of those that went well."""
    members: dict[Key, list[Finished]] = {}
    for each in finished:
        spec = each.planned.spec
        members.setdefault((each.planned.label, spec.data, spec.tasks), []).append(each)
    found = []
    for key, runs in members.items():
        results = [run.result for run in runs if run.result is not None]
        found.append((key, runs, Group(key[0], group_runs(results)[0].runs) if results else None))
    return found


class ResultLog:
    """`results.jsonl`: a line for each run that ended, added when it ends and never removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = {line.get("run") for line in read_log(path) if line.get("status") == "done"}

    def add(self, planned: Planned, result: RunResult | None, error: str = "") -> None:
        """Add a line; a run that is in the log as done is not added again."""
        if result is not None and planned.folder.name in self._known:
            return
        spec = planned.spec
        line: dict[str, Any] = {"run": planned.folder.name, "status": "done" if result else "failed"}
        line |= {"label": planned.label, "method": spec.method, "data": spec.data, "seed": spec.seed}
        line |= {"backbone": spec.backbone, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        if result is None:
            line["error"] = error
        else:
            line |= {"tasks": result.tasks, **{key: result.values[key] for key in NUMBERS}}
            line |= {"seconds": round(result.seconds, 3), "after": result.values["after"]}
            self._known.add(planned.folder.name)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open_log(self.path) as file:
                # A process killed while it wrote left half a line: do not lengthen it.
                torn = file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
                file.write(b"\n" * bool(torn) + json.dumps(line).encode() + b"\n")
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror or error}") from error


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of `results.jsonl`; half a line, left by a process that was killed, is skipped."""
    try:
        data = read_bytes(path)
    except MissingFileError:
        return []
    if data and not data.startswith(b'{"run": '):
        raise UserError(f"{path} is there already and no log of a bench; name another folder with --out")
    lines = []
    for text in data.decode(errors="replace").splitlines():
        try:
            value = parse_json(text, str(path))
        except UserError:
            continue
        if isinstance(value, dict) and isinstance(value.get("run"), str):
            lines.append(value)
    return lines

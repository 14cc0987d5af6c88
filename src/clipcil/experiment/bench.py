"""Running a grid: in one process, reusing what is done, going on after what fails."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipcil.errors import UserError
from clipcil.experiment.display import Display
from clipcil.experiment.grid import Planned
from clipcil.experiment.run import Shared, run
from clipcil.experiment.spec import as_table
from clipcil.files import write_text
from clipcil.report.compare import Group, group_runs
from clipcil.report.console import Line
from clipcil.report.runs import RunResult, read_run

RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Finished:
    """A run of the grid and how it ended."""

    planned: Planned
    result: RunResult | None
    error: str = ""


def run_grid(
    planned: Sequence[Planned],
    out: Path,
    tell: Callable[[str], None] = lambda line: None,
    make_display: Callable[[], Display] = Display,
) -> list[Finished]:
    """Do every run that is not done yet. Backbones, datasets and features of towers nobody moved are shared.

    A run that was stopped goes on from its checkpoint. One that fails is told in a line (the whole story stands in
    `error.txt` of its folder) and the rest go on. Each run that ends adds a line to `results.jsonl`.
    """
    shared = Shared()
    log = ResultLog(out / RESULTS)
    finished: list[Finished] = []
    ended: dict[Path, Finished] = {}
    for number, each in enumerate(planned, start=1):
        name = f"[{number}/{len(planned)}] {each.label} on {each.spec.data}, seed {each.spec.seed}"
        if each.folder in ended:  # two rows of the grid may be the same run
            before = ended[each.folder]
            finished.append(Finished(each, before.result, before.error))
            continue
        result = finished_run(each)
        state = "done before"
        if result is None:
            state = "done"
            try:
                result, error = _attempt(each, shared, make_display)
            except KeyboardInterrupt as stop:
                where = f"stopped in run {number} of {len(planned)}"
                raise KeyboardInterrupt(f"{where}; the same command goes on from there") from stop
            if result is None:
                ended[each.folder] = Finished(each, None, error)
                finished.append(ended[each.folder])
                tell(f"{name}: FAILED: {error}")
                log.add(each, None, error)
                continue
        ended[each.folder] = Finished(each, result)
        finished.append(ended[each.folder])
        log.add(each, result)
        tell(f"{name}: A_B {result.last:.2f}, Ā {result.average:.2f}, {result.seconds:.1f} s ({state})")
    return finished


def finished_run(planned: Planned) -> RunResult | None:
    """The results in the folder, if they are whole and of exactly these settings."""
    if planned.problem:
        return None
    try:
        found = read_run(planned.folder)
    except UserError:
        return None
    asked = json.dumps(as_table(planned.spec, planned.config), sort_keys=True)
    return found if json.dumps(found.values["config"], sort_keys=True) == asked else None


def lines_of(finished: Sequence[Finished], table: str = "") -> list[Line]:
    """A line of the table for each label on each dataset, in the order of the grid."""
    together: dict[tuple[str, str], list[Finished]] = {}
    for each in finished:
        together.setdefault((each.planned.label, each.planned.spec.data), []).append(each)
    lines = []
    for (label, data), members in together.items():
        results = [member.result for member in members if member.result is not None]
        group = Group(label, group_runs(results)[0].runs) if results else None
        paper = None
        if group is not None:
            paper = group.printed(table if table != "sensitivity" else "") or group.printed()
        tasks = group.first.tasks if group else members[0].planned.spec.tasks
        lines.append(Line(label, data, tasks, group, paper, sum(member.result is None for member in members)))
    return lines


class ResultLog:
    """`results.jsonl`: a line for each run that ended, added when it ends and never taken back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = {line.get("run") for line in read_log(path) if line.get("status") == "done"}

    def add(self, planned: Planned, result: RunResult | None, error: str = "") -> None:
        """A run that stands there as done is not written again."""
        if result is not None and planned.folder.name in self._known:
            return
        spec = planned.spec
        line: dict[str, Any] = {"run": planned.folder.name, "status": "done" if result else "failed"}
        line |= {"label": planned.label, "method": spec.method, "data": spec.data, "seed": spec.seed}
        line |= {"backbone": spec.backbone, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        if result is None:
            line["error"] = error
        else:
            numbers = ("last", "average", "last_weighted", "average_weighted", "forgetting", "backward_transfer")
            line |= {"tasks": result.tasks, **{key: result.values[key] for key in numbers}}
            line |= {"seconds": round(result.seconds, 3), "after": result.values["after"]}
            self._known.add(planned.folder.name)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():  # a process killed while it wrote left half a line: do not lengthen it
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"
                file.write(b"\n" * torn)
            file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of `results.jsonl`; half a line, left by a process that was killed, is passed over."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict):
            lines.append(value)
    return lines


def _attempt(planned: Planned, shared: Shared, make_display: Callable[[], Display]) -> tuple[RunResult | None, str]:
    if planned.problem:
        return None, planned.problem
    try:
        run(planned.spec, planned.config, planned.folder, make_display(), resume=True, shared=shared)
        (planned.folder / "error.txt").unlink(missing_ok=True)
        return read_run(planned.folder), ""
    except UserError as error:
        return None, str(error)
    except Exception as error:  # whatever a method raises: the rest of the grid does not depend on it
        write_text(planned.folder / "error.txt", traceback.format_exc())
        first = (str(error).splitlines() or [""])[0]
        return None, f"{type(error).__name__}: {first} (see {planned.folder / 'error.txt'})"

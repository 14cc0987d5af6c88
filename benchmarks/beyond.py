"""The best method against all others, paired by class order and seed: `python -m benchmarks.beyond runs/beyond`.

Reads every finished run below a folder (those of `clipcil bench`), and prints A_B of each method on each stream, and by
how much the chosen method is above it: the mean of the differences between runs of the same class order and seed, and
its standard error.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

from clipcil.report.runs import RunResult, find_runs

Stream = tuple[str, int]
Scores = dict[tuple[str, int], float]
"""A_B by class order and seed."""


def name_of(run: RunResult) -> Stream:
    """`cifar100/50` for at most 50 training pictures per class, and the number of tasks."""
    shots = run.run.get("shots")
    return run.data + (f"/{shots}" if shots else ""), run.tasks


def collect(runs: list[RunResult]) -> dict[Stream, dict[str, Scores]]:
    """A_B by stream, method, and class order and seed."""
    found: dict[Stream, dict[str, Scores]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        found[name_of(run)][run.method][run.order, run.seed] = run.last
    return found


def above(ours: Scores, theirs: Scores) -> tuple[float, float, int]:
    """Mean difference over runs of the same order and seed, its standard error, and their number."""
    gaps = [ours[key] - theirs[key] for key in sorted(ours.keys() & theirs.keys())]
    if not gaps:
        return float("nan"), float("nan"), 0
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
    return statistics.fmean(gaps), error, len(gaps)


def table(found: dict[Stream, dict[str, Scores]], best: str) -> str:
    """Markdown: a row for each method, a column for each stream; the last column averages the differences."""
    streams = sorted(found)
    methods = sorted({method for scores in found.values() for method in scores})
    head = ["A_B (ours above it ± standard error)", *(f"{data}, {tasks} tasks" for data, tasks in streams), "average"]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for method in sorted(methods, key=lambda name: (name != best, name)):
        cells, gaps = [method], []
        for stream in streams:
            scores = found[stream].get(method, {})
            if not scores:
                cells.append("–")
                continue
            gap, error, count = above(found[stream].get(best, {}), scores)
            gaps.append(gap)
            level = statistics.fmean(scores.values())
            cells.append(f"{level:.1f}" if method == best else f"{level:.1f} ({gap:+.1f} ± {error:.1f}, {count})")
        cells.append("" if method == best else f"{statistics.fmean(gaps):+.1f} over {len(gaps)} streams")
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beyond", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--best", default="strata", help="the method that the others are compared with")
    options = parser.parse_args()
    print(table(collect(find_runs([options.folder])), options.best))


if __name__ == "__main__":
    main()

"""The best method against all others, paired by class order and seed: `python -m reproduce beyond runs/beyond`.

Prints A_B of each method on each stream, and by how much the chosen method is above it: the mean of the differences
between runs of the same class order and seed, and its standard error.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import nan
from statistics import fmean, stdev

from clipcil.errors import UserError
from clipcil.paper import Row, read_table
from clipcil.report.compare import group_runs
from clipcil.report.runs import RunRecord
from clipcil.report.statistics import order_means
from reproduce.claims import markdown_table
from reproduce.judge import since_then

Stream = tuple[str, int]
Scores = dict[tuple[str, int], float]
"""A_B by class order and seed."""


def name_of(run: RunRecord) -> Stream:
    """`cifar100/50` for at most 50 training pictures per class, `(held out)` for held-out ones; the number of tasks."""
    shots, held_out = run.run.get("shots"), run.run.get("hold_out")
    return run.data + (f"/{shots}" if shots else "") + (" (held out)" if held_out else ""), run.tasks


def collect(runs: Sequence[RunRecord]) -> dict[Stream, dict[str, Scores]]:
    """A_B by stream, method, and class order and seed; of runs with the settings that their method has today, and that
    the claims give it for a number of tasks. Streams of one name that differ otherwise are refused."""
    for_tasks = {row.method: row.for_tasks for row in read_table("claims").rows if row.for_tasks}
    found: dict[Stream, dict[str, Scores]] = defaultdict(lambda: defaultdict(dict))
    first: dict[Stream, RunRecord] = {}
    for group in group_runs(runs):
        method = group.first.method
        if since_then(group, Row(group.label, method, for_tasks=for_tasks.get(method, {}))) == {}:
            other = first.setdefault(name_of(group.first), group.first)
            if other.stream != group.stream:
                raise UserError(f"{other.folder} and {group.first.folder} are not on the same stream of tasks")
            for run in group.runs:
                found[name_of(run)][run.method][run.order, run.seed] = run.last
    return found


def above(ours: Scores, theirs: Scores) -> tuple[float, float, int]:
    """Mean difference over runs of the same order and seed, its standard error, and the number of class orders.

    Seeds of one class order share what is particular to it, so they count once: the error is that of the orders' means.
    """
    gaps = [(place[0], ours[place] - theirs[place]) for place in sorted(ours.keys() & theirs.keys())]
    means = order_means(gaps)
    error = stdev(means) / len(means) ** 0.5 if len(means) > 1 else nan
    return fmean(gap for _, gap in gaps) if gaps else nan, error, len(means)


def table(found: dict[Stream, dict[str, Scores]], best: str) -> str:
    """Markdown: a row for each method, a column for each stream that has runs of the best; the last averages."""
    streams = sorted(stream for stream, scores in found.items() if best in scores)
    methods = {method for stream in streams for method in found[stream]}
    head = ["A_B (ours above it ± standard error)", *(f"{data}, {tasks} tasks" for data, tasks in streams), "average"]
    lines = []
    for method in sorted(methods, key=lambda name: (name != best, name)):
        cells, gaps = [method], []
        for stream in streams:
            scores = found[stream].get(method, {})
            gap, error, count = above(found[stream][best], scores)
            level = f"{fmean(scores.values()):.1f}" if scores else "–"
            if method != best and count:
                gaps.append(gap)
                level += f" ({gap:+.1f}" + (f" ± {error:.1f}, {count})" if count > 1 else ", 1)")
            cells.append(level)
        cells.append(f"{fmean(gaps):+.1f} over {len(gaps)} stream{'s' * (len(gaps) > 1)}" if gaps else "")
        lines.append(cells)
    return markdown_table(head, lines)

"""`python -m reproduce tables`: rewrite the tables of the documents that are made from evidence.

A table stands between the lines `<!-- results:NAME -->` and `<!-- /results -->` and is made from the claims' runs.
`<!-- results:NAME PLACE -->` makes the table from another part of the evidence, or from a folder of measurements.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from benchmarks.harness import speed_table
from clipcil.errors import UserError
from clipcil.paper import Row, read_table
from clipcil.report.compare import Group, Stream, flatten, group_runs, method_title, show
from clipcil.report.runs import RunRecord, find_runs
from clipcil.storage import read_text, write_text
from reproduce import beyond, held_out
from reproduce.claims import DASH, markdown, markdown_table, stream_namer
from reproduce.judge import Claim, ClaimResult, find_rows, judge_claims, read_claims
from reproduce.keep import NOTES

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE, CLAIMS = "reproduce/evidence", "reproduce/evidence/claims"
SHORT = ("Strata", "RanPAC", "RAPF", "ENGINE", "SimpleCIL", "DMC-OT")
SHORT_COLUMNS = ("cifar100, 100 per class, 10 tasks", "cub200, 10 tasks", "emoji, 10 tasks")
MARKED = re.compile(r"<!-- results:(\w+)(?: ([\w/-]+))? -->\n.*?<!-- /results -->", re.DOTALL)


@cache
def runs_in(folder: Path) -> list[RunRecord]:
    """The runs of a part of the evidence, read once for all tables."""
    return find_runs([folder])


@cache
def judged_in(folder: Path) -> list[ClaimResult]:
    """The claims judged by these runs."""
    return judge_claims(runs_in(folder))


def methods_table(runs: Sequence[RunRecord]) -> str:
    """A_B and Ā of each method with its own settings on each stream of tasks."""
    groups = group_runs(runs)
    return _accuracies(_method_rows(groups), groups)


def short_table(runs: Sequence[RunRecord]) -> str:
    """The table of the README: six methods on three datasets in 10 tasks, the best of the first one first."""
    groups = group_runs(runs)
    found = find_rows([row for row in _method_rows(groups) if row.label in SHORT], groups)
    name = stream_namer(sorted({stream for stream, _ in found}))
    cells = {(name(stream), label): group for (stream, label), group in found.items()}
    lines = [[label, *(_cell(cells[column, label]) for column in SHORT_COLUMNS)] for label in SHORT]
    lines.sort(key=lambda line: cells[SHORT_COLUMNS[0], line[0]].last.mean, reverse=True)
    return markdown_table(["A_B ± s (Ā), %", *(column.removesuffix(", 10 tasks") for column in SHORT_COLUMNS)], lines)


def _method_rows(groups: Sequence[Group]) -> list[Row]:
    """A row for each method: those of the claims, then the others."""
    rows: dict[str, Row] = {}
    for row in read_table("claims").rows:
        rows.setdefault(row.method, row)  # the first of a method; the others are its parts
    others = {
        method: Row(method_title(method), method) for group in groups if (method := group.first.method) not in rows
    }
    return [*rows.values(), *others.values()]


def ablations_table(runs: Sequence[RunRecord]) -> str:
    """The same for the parts of DMC and DMC-OT, on the streams where one of the parts was measured.

    Rows such as `M = 2` are left out: the claims compare them.
    """
    rows = [row for row in read_table("claims").rows if row.method.startswith("dmc") and " = " not in row.label]
    groups = group_runs(runs)
    parts = {stream for stream, _ in find_rows([row for row in rows if row.label not in ("DMC", "DMC-OT")], groups)}
    return _accuracies(rows, [group for group in groups if group.stream in parts])


def _accuracies(rows: Sequence[Row], groups: Sequence[Group]) -> str:
    """A table for each dataset, with a column for each of its streams; all in one could not be read for its width."""
    found = find_rows(rows, groups)
    streams = sorted({stream for stream, _ in found})
    name = stream_namer(streams)
    cells = {place: _cell(group) for place, group in found.items()}
    tables = []
    for data in dict.fromkeys(stream[0] for stream in streams):
        own = [stream for stream in streams if stream[0] == data]
        head = ["A_B ± s (Ā), %", *(f"{name(stream)}{_orders(found, stream)}" for stream in own)]
        lines = [[row.label, *(cells.get((stream, row.label), DASH) for stream in own)] for row in rows]
        tables.append(markdown_table(head, [line for line in lines if {*line[1:]} != {DASH}]))
    return "\n\n".join(tables)


def _cell(group: Group) -> str:
    return f"{_accuracy(group)} ({group.average.mean:.1f})"


def _accuracy(group: Group) -> str:
    spread = f" ± {group.last.std:.1f}" if group.last.std is not None else ""
    return f"{group.last.mean:.1f}{spread}"


def _orders(found: dict[tuple[Stream, str], Group], stream: Stream) -> str:
    counts = {len(group.orders) for (own, _), group in found.items() if own == stream}
    low, high = min(counts), max(counts)
    return f"; {low}–{high} orders" if low < high else f"; {low} order{'s' * (low > 1)}"


def claims_table(judged: Sequence[ClaimResult]) -> str:
    """Each claim with its verdict on each dataset and number of training pictures.

    A claim that is judged with several numbers of tasks has one verdict where they agree.
    """
    judged = [each for each in judged if each.verdict != "not measured"]
    name = stream_namer(sorted({each.stream for each in judged}))
    column = {each.stream: name(each.stream).replace(f", {each.stream[1]} tasks", "") for each in judged}
    columns = list(dict.fromkeys(column[stream] for stream in sorted(column)))
    lines = []
    for number, claim in enumerate(read_claims(), start=1):
        own = {each: [one for one in judged if one.claim == claim and column[one.stream] == each] for each in columns}
        lines.append([f"{number}. {claim.says}", *(_verdict(claim, own[each]) for each in columns)])
    return markdown_table(["claim of the paper", *columns], lines)


def _verdict(claim: Claim, judged: Sequence[ClaimResult]) -> str:
    """One cell: the verdict, with the number of tasks where it is not that of every number the claim is judged with."""
    said = {each.stream[1]: each.verdict for each in judged}
    if len({*said.values()}) == 1 and {*said} == {*claim.tasks}:
        return judged[0].verdict
    return "; ".join(f"{verdict} ({tasks} tasks)" for tasks, verdict in said.items()) or DASH


def choice_table(runs: Sequence[RunRecord]) -> str:
    """Runs on held-out training pictures that differ in settings: a line for each choice, the best of a method last."""
    lines = []
    for method in sorted({run.method for run in runs}):
        groups = sorted(group_runs([run for run in runs if run.method == method]), key=lambda group: group.last.mean)
        own = [flatten(group.first.settings) for group in groups]
        keys = [key for key in own[0] if len({repr(each.get(key)) for each in own}) > 1]
        for group, each in zip(groups, own, strict=True):
            chosen = ", ".join(f"`{key}={show(each.get(key))}`" for key in keys)
            lines.append([method_title(method), chosen, str(len(group.runs)), _accuracy(group)])
    return markdown_table(["method", "settings", "folds", "accuracy"], lines)


TABLES: dict[str, Callable[[Path], str]] = {
    "methods": lambda folder: methods_table(runs_in(folder)),
    "short": lambda folder: short_table(runs_in(folder)),
    "ablations": lambda folder: ablations_table(runs_in(folder)),
    "claims": lambda folder: claims_table(judged_in(folder)),
    "beyond": lambda folder: beyond.table(beyond.collect(runs_in(folder)), "strata"),
    "choice": lambda folder: choice_table(runs_in(folder)),
    "heads": lambda folder: held_out.combined(held_out.read_kept(folder), "heads"),
    "novelty": lambda folder: held_out.combined(held_out.read_kept(folder), "novelty"),
    "speed": speed_table,
    "ratios": lambda folder: speed_table(folder, compared=True),
}
"""Each table, made from the folder that its marker names."""


def updated(text: str, root: Path) -> str:
    """The text with every marked table made anew from the claims' runs, or from the place that its marker names."""

    def table(found: re.Match[str]) -> str:
        if found[1] not in TABLES:
            raise UserError(f"there is no table '{found[1]}' of results; known: {', '.join(TABLES)}")
        return f"{found[0].splitlines()[0]}\n\n{TABLES[found[1]](root / (found[2] or CLAIMS))}\n\n<!-- /results -->"

    return MARKED.sub(table, text)


def pages(root: Path) -> dict[Path, str]:
    """The README, the pages with tables, and that of claims, as they should be."""
    note = read_text(root / EVIDENCE / NOTES)
    marked = [
        root / "README.md",
        *(root / "docs" / f"{name}.md" for name in ("results", "baselines", "beyond", "speed")),
    ]
    return {
        **{path: updated(read_text(path), root) for path in marked},
        root / "docs" / "claims.md": markdown(runs_in(root / CLAIMS), judged_in(root / CLAIMS), note),
    }


def update(check: bool, root: Path = ROOT) -> list[Path]:
    """Write every page that differs from the evidence, unless `check`; returns the pages that differ."""
    made = pages(root)
    stale = [path for path, text in made.items() if not path.is_file() or read_text(path) != text]
    for path in stale if not check else ():
        write_text(path, made[path])
    return stale

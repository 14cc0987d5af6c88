"""`python -m reproduce claims`: the judged claims on a terminal and as the page `docs/claims.md`."""

import re
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from clipcil.errors import UserError, printable
from clipcil.paper import BACKBONE
from clipcil.report.compare import Stream, stream_titles
from clipcil.report.runs import RunRecord
from clipcil.report.statistics import order_means
from reproduce.judge import ClaimResult, Part, outdated, read_claims

HOW = """Each comparison is the mean over class orders of A_B of the first − A_B of the second, run on the same order
with the same seed, in percentage points. **95 %** is its interval over class orders and test pictures: pictures are
resampled (bootstrap, 2,000 draws), and because three orders are too few for that, what their mean may be off by is
drawn from Student's t. **t** is Student's interval over the orders alone, as if there were any number of pictures.
A claim of the form "A beats B" *holds* where the 95 % interval lies above 0, *does not hold* where it lies below
0, and *cannot be told* otherwise, or with fewer than 3 class orders. A claim of stability holds where the interval lies
within the margin named. A claim with several parts holds where all hold, and does not hold where one does not. No
correction is made for the number of comparisons. `tests/report/test_statistics.py` simulates three orders that differ
by 0, 2 or 5 points (standard deviation) and asserts that the 95 % interval contains the true difference as often as it
should."""
DASH = "–"


def markdown(runs: Sequence[RunRecord], judged: Sequence[ClaimResult], note: str = "") -> str:
    """The page `docs/claims.md` of claims judged by `runs`; the Markdown of `note` stands below the summary."""
    streams = sorted({each.stream for each in judged})
    name = stream_namer(streams)
    counts = {stream: next(run.test_pictures for run in runs if run.stream == stream) for stream in streams}
    verdicts = {(each.claim, each.stream): each.verdict for each in judged}
    minutes = sum(run.seconds for run in runs) / 60
    used = _one_line(", ".join(dict.fromkeys(stream[2] for stream in streams)))
    about = f"{len(runs)} runs, {minutes:.0f} minutes in all; backbone {used}, where the paper has {BACKBONE}."
    parts: list[str] = []
    summary = []
    for number, claim in enumerate(read_claims(), start=1):
        summary.append([f"{number}. {claim.says}", *(verdicts.get((claim, stream), DASH) for stream in streams)])
        parts.append(f"## {number}. {claim.says}")
        if claim.margin is not None:
            parts.append(f"Margin: ± {claim.margin:g} points (ours; the paper gives none).")
        lines = []
        for each in (one for one in judged if one.claim == claim):
            where = f"{name(each.stream)} ({counts[each.stream]:,} pictures)"
            lines += [[where, f"{claim.better} − {part.worse}", *_cells(part)] for part in each.parts]
        head = ["on", "difference", "mean", "95 %", "t", "by order", "paper", "verdict"]
        parts.append(markdown_table(head, lines) if lines else "Not measured.")
    parts = [
        "# The paper's claims, measured",
        f"Written by `python -m reproduce tables`; do not edit by hand. {about}",
        HOW,
        markdown_table(["claim", *map(name, streams)], summary),
        *([note.strip()] if note.strip() else []),
        *parts,
    ]
    return "\n\n".join(parts) + "\n"


def _cells(part: Part) -> list[str]:
    """Mean, interval, t interval, the differences by order, the paper's number, verdict."""
    interval, over = part.difference, part.over_orders
    values, means = [value for _, value in part.by_order], order_means(part.by_order)
    mean = f"{sum(means) / len(means):+.2f}" if means else DASH
    own = f"{interval.low:+.2f} to {interval.high:+.2f}" if interval else DASH
    by_t = f"{over.low:+.2f} to {over.high:+.2f}" if over else DASH
    paper = DASH if part.paper is None else f"{part.paper:+.2f}{' (mean)' * part.is_paper_mean}"
    cells = [mean, own, by_t, ", ".join(f"{value:+.1f}" for value in values) or DASH, paper]
    return [*(cell.replace("-", "−") for cell in cells), part.verdict]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; a name may hold what would end a cell, or be read as HTML."""
    lines = [[_one_line(cell).replace("|", "\\|") for cell in line] for line in (head, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], ["---"] * len(head), *lines[1:]))


def _one_line(text: str) -> str:
    """Text for Markdown without line breaks and tags; `<180 s` is not a tag."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", " ".join(text.split()))


def stream_namer(streams: Sequence[Stream]) -> Callable[[Stream], str]:
    """A short name for each stream: `emoji, 10 tasks`, with what else tells two of them apart."""
    titles = dict(zip(streams, stream_titles(streams), strict=True))
    same = len({stream[2] for stream in streams}) == 1
    return lambda stream: titles[stream].replace(f", {stream[2]}", "", 1) if same else titles[stream]


def print_claims(runs: Sequence[RunRecord], judged: Sequence[ClaimResult]) -> None:
    """Print each claim with its verdicts; runs of no claim are refused."""
    if not judged:
        raise UserError("none of these runs belongs to a claim; clipcil bench claims makes those that do")
    name = stream_namer(list(dict.fromkeys(each.stream for each in judged)))
    table = Table("claim", "verdict", box=None, pad_edge=False, header_style="bold")
    for claim in read_claims():
        own = [each for each in judged if each.claim == claim and each.verdict != "not measured"]
        said = "; ".join(f"{each.verdict} ({name(each.stream)})" for each in own)
        table.add_row(claim.says, printable(said) or "not measured")
    Console(highlight=False, markup=False).print(table)
    for line in outdated(runs):
        print(printable(f"note: {line}"))

"""`python -m reproduce COMMAND`: the paper's claims, the kept evidence, and the tables made from it.

python -m reproduce claims                          # judge the paper's claims by the evidence
python -m reproduce claims runs/bench               # by other runs
python -m reproduce tables [--check]                # rewrite docs/claims.md and the tables in README.md and docs/
python -m reproduce beyond runs/beyond             # the best method against all others, as docs/beyond.md has it
python -m reproduce keep runs/bench --part claims   # add finished runs to the evidence
clipcil bench claims --data-root DIR --kept reproduce/evidence --dry-run   # the runs of the grid that are missing
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from clipcil.errors import UserError
from clipcil.report.runs import find_runs
from clipcil.storage import write_text
from reproduce.beyond import collect, table
from reproduce.claims import markdown, print_claims
from reproduce.judge import judge_claims
from reproduce.keep import EVIDENCE, keep
from reproduce.tables import ROOT, update


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    whole = argparse.ArgumentParser(
        prog="python -m reproduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = whole.add_subparsers(dest="command", required=True)
    claims = commands.add_parser("claims", help="judge the paper's claims: holds, does not hold, or cannot be told")
    claims.add_argument("runs", nargs="*", type=Path, help="folders of runs; default: the evidence")
    claims.add_argument("--out", type=Path, metavar="FILE", help="write a Markdown page with every comparison, too")
    pages = commands.add_parser("tables", help="rewrite docs/claims.md and the tables made from evidence")
    pages.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page is not current")
    best = commands.add_parser("beyond", help="compare a method with all others, paired by class order and seed")
    best.add_argument("runs", nargs="+", type=Path, help="folders of runs, or folders that hold them")
    best.add_argument("--best", default="strata", help="the method; default: strata")
    kept = commands.add_parser("keep", help="add finished runs to the evidence")
    kept.add_argument("runs", nargs="+", type=Path, help="folders of runs, or folders that hold them")
    kept.add_argument("--part", default="claims", help="part of the evidence; default: claims")
    kept.add_argument("--evidence", type=Path, default=EVIDENCE, help="folder of the evidence")
    options = whole.parse_args(words)
    try:
        if options.command == "claims":
            runs = find_runs(options.runs or [EVIDENCE / "claims"])
            judged = judge_claims(runs)
            print_claims(runs, judged)
            if options.out is not None:
                write_text(options.out, markdown(runs, judged))
        elif options.command == "beyond":
            print(table(collect(find_runs(options.runs)), options.best))
        elif options.command == "keep":
            print(f"{keep(options.runs, options.part, options.evidence)} runs added to the evidence")
        else:
            stale = update(options.check)
            for path in stale:
                print(f"{path.relative_to(ROOT)} {'is not current' if options.check else 'was written'}")
            return int(bool(stale) and options.check)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

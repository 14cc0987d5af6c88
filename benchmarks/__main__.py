"""`python -m benchmarks [--only P3,S8] [--quick] [--json FILE]`."""

import argparse
import importlib
import sys
import time
from pathlib import Path

import torch

from benchmarks.harness import Row, machine, table
from clipcil.storage import write_json

BENCHMARKS = {
    "P1": "p1_prompt_step",
    "P2": "p2_features_once",
    "P3": "p3_memory",
    "P4": "p4_tower_passes",
    "P7": "p7_growth",
    "P8": "p8_flagship",
    "S3": "s3_predict",
    "S8": "s8_serve_load",
    "S9": "s9_lesson",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default="", help="some of them, such as P3,S8")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, not how fast")
    parser.add_argument("--json", type=Path, help="write every number to this file too")
    parser.add_argument("--threads", type=int, help="threads of both sides; default: torch's own choice")
    given = parser.parse_args()
    chosen = [name.strip().upper() for name in given.only.split(",") if name.strip()] or list(BENCHMARKS)
    if unknown := [name for name in chosen if name not in BENCHMARKS]:
        parser.error(f"no benchmark {unknown[0]}; there are {', '.join(BENCHMARKS)}")
    if given.threads:
        torch.set_num_threads(given.threads)
    about = machine() | {"quick": given.quick}
    print(", ".join(f"{key}: {value}" for key, value in about.items()), file=sys.stderr)
    rows: list[Row] = []
    for name in chosen:
        start = time.perf_counter()
        found: list[Row] = importlib.import_module(f"benchmarks.{BENCHMARKS[name]}").run(given.quick)
        if given.quick:  # the goals hold for the real sizes only
            for row in found:
                row.goal, row.met = "", None
        rows += found
        for row in found:
            print("  ".join(cell for cell in row.cells() if cell), file=sys.stderr, flush=True)
        print(f"{name} took {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        if given.json:  # after each of them, so that an interrupted measurement is not lost
            write_json(given.json, {"machine": about, "rows": [row.as_dict() for row in rows]})
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

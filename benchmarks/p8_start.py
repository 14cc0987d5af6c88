"""P8: how long a person waits for `clipcil --help` and for `import clipcil`."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.harness import Row, alternate, duration


def run(quick: bool) -> list[Row]:
    def start(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)

    sides = {
        "nothing": lambda: start("-c", "pass"),
        "--help": lambda: start("-m", "clipcil", "--help"),
        "import": lambda: start("-c", "import clipcil"),
    }
    seconds = alternate(sides, repeats=3 if quick else 9)
    note = f"Python alone takes {duration(seconds['nothing'])} of it"
    rows = []
    for key, what, limit in (("--help", "clipcil --help", 0.5), ("import", "import clipcil", 0.2)):
        spent = duration(seconds[key])
        met, details = seconds[key] < limit, {"seconds": seconds}
        rows.append(Row("P8", what, "", spent, spent, f"<{limit} s", met, note=note, details=details))
        note = ""
    return rows

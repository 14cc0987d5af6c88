"""P8: how long a person waits for `clipcil --help`, for `import clipcil` and for the embedded backbone."""

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
        "torch": lambda: start("-c", "import torch"),
        "load": lambda: start("-c", "import clipcil; clipcil.load_clip('mini')"),
    }
    seconds = alternate(sides, repeats=3 if quick else 9)
    note = f"Python alone takes {duration(seconds['nothing'])} of it"
    rows = []
    for key, what, limit in (("--help", "clipcil --help", 0.5), ("import", "import clipcil", 0.2)):
        spent = duration(seconds[key])
        met, details = seconds[key] < limit, {"seconds": seconds}
        rows.append(Row("P8", what, "", spent, spent, f"<{limit} s", met, note=note, details=details))
        note = ""
    load, alone = seconds["load"], seconds["torch"]
    what = "import clipcil and load mini; beside it: import torch alone"
    rows.append(Row("P8", what, duration(alone), duration(load), f"{load / alone:.1f}×", details={"seconds": seconds}))
    return rows

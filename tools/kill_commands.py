"""Kill commands that write with SIGKILL at random moments, look at what they left, give them again, and look again.

What is killed in the middle leaves what was there before or what was to be there after, never something between. The
same command given again ends as if nobody had killed it, with the same files and nothing left over.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import fuzz_server


class Trial:
    """One command. `words(place)` works in a folder that `prepare` has filled; `outcome(place)` is what counts."""

    def __init__(self, name: str, work: Path) -> None:
        self.name, self.stock = name, work / "stock"

    def prepare(self, place: Path) -> None:
        place.mkdir()
        for source in ("model", "run"):
            shutil.copytree(self.stock / source, place / source)

    def words(self, place: Path) -> list[str]:
        model, pictures = str(place / "model"), str(self.stock / "pictures")
        simple = ["--methods", "simplecil", "--data", "folder", "--data-root", f"folder={pictures}", "--increment", "2"]
        asked = ["--endpoint", (self.stock / "server").read_text(), "--model", "m"]
        return {
            "learn": ["learn", model, str(self.stock / "week2"), "--quiet"],
            "forget": ["forget", model, "blue"],
            "rename": ["rename", model, "blue", "navy blue"],
            "export": ["export", model, "--out", str(place / "export")],
            "report": ["report", str(place / "run")],
            "describe": ["describe", str(self.stock / "names.txt"), "--out", str(place / "out.json"), *asked],
            "bench": ["bench", *simple, "--out", str(place / "bench"), "--quiet"],
        }[self.name]

    def outcome(self, place: Path) -> str:
        """The state of what the command writes: equal for equal states, an error where it is broken."""
        from clipcil.classifier.folder import load_model
        from clipcil.report.runs import read_run

        if self.name in ("learn", "forget", "rename"):
            facts, _ = load_model(place / "model")
            return json.dumps([[known.name for known in facts.known], facts.sha256])
        if self.name == "describe":
            return (place / "out.json").read_text() if (place / "out.json").exists() else ""
        if self.name == "bench":
            runs = sorted((place / "bench").glob("*/results.json"))
            return json.dumps([read_run(path.parent).values["after"] for path in runs])
        return ""

    def files(self, place: Path) -> list[str]:
        """Names of all files, without what is named after a checksum and without folders of intermediate states."""
        found = (path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
        found = (name for name in found if not name.endswith("previous.toml"))  # kept for an undo until the next change
        return sorted(name.split("weights-")[0] + "weights" * ("weights-" in name) for name in found)


NAMES = ("learn", "forget", "rename", "export", "report", "describe", "bench")


def make_stock(work: Path, run: Callable[[list[str]], int]) -> None:
    """A model of two classes, pictures for a second lesson, a finished run, class names and a server that answers."""
    from PIL import Image

    stock = work / "stock"
    lessons = {"week1/red": ("red", "darkred"), "week1/blue": ("blue", "navy"), "week2/green": ("green", "lime")}
    for place, colours in lessons.items():
        (stock / place).mkdir(parents=True)
        for colour in colours:
            Image.new("RGB", (64, 64), colour).save(stock / place / f"{colour}.png")
    shutil.copytree(work / "pictures", stock / "pictures")
    (stock / "names.txt").write_text("\n".join(f"class {number}" for number in range(9)))
    (stock / "server").write_text(f"{fuzz_server.start()}/good")
    words = [
        "--data",
        "folder",
        "--data-root",
        str(stock / "pictures"),
        "--increment",
        "2",
        "--out",
        str(stock / "run"),
    ]
    learn = ["learn", str(stock / "model"), str(stock / "week1"), "--quiet", "--method", "simplecil"]  # it can do all
    for command in (learn, ["run", "simplecil", *words]):
        if run(command):
            sys.exit(f"clipcil {command} failed")


def kill_commands(
    work: Path, kills: int, chance: Random, start: Callable[[list[str]], int], end: Callable[[int, bool], int]
) -> tuple[int, int]:
    """Kill `kills` commands; returns the kills that struck and the trials that went wrong.

    Args:
        work: Folder for everything.
        kills: How many times a command is killed; one that ends before it is struck does not count.
        chance: When.
        start: Starts `clipcil` with these words in a process of its own; returns its number.
        end: Waits for a process, killing it first if told to; returns its exit code.
    """
    make_stock(work, lambda words: end(start(words), False))
    after: dict[str, tuple[str, list[str], float]] = {}
    number = struck = bad = 0
    while struck < kills:
        trial = Trial(NAMES[number % len(NAMES)], work)
        if trial.name not in after:
            place = work / f"whole-{trial.name}"
            trial.prepare(place)
            since = time.monotonic()
            if end(start(trial.words(place)), False):
                sys.exit(f"clipcil {trial.name} failed")
            after[trial.name] = trial.outcome(place), trial.files(place), time.monotonic() - since
        place = work / f"trial-{number}"
        trial.prepare(place)
        before = trial.outcome(place)
        whole, files, seconds = after[trial.name]
        process = start(trial.words(place))
        time.sleep(chance.uniform(0, 1.1 * seconds))
        struck += end(process, True) == -9
        problem = ""
        left = trial.outcome(place)
        if trial.name in ("learn", "forget", "rename") and left not in (before, whole):
            problem = f"left something between: {left}"
        learnt = trial.name == "learn" and left == whole  # given again, it would learn the same pictures twice
        again = end(start(["rename", str(place / "model"), "red", "red"] if learnt else trial.words(place)), False)
        done = trial.name in ("forget", "rename") and left == whole  # given again, it finds nothing to do and says so
        if again != (2 if done else 0):
            problem = f"given again it ended with {again}"
        elif trial.name != "describe" and trial.outcome(place) != whole:
            problem = "given again it ended otherwise"
        elif extra := set(trial.files(place)) ^ set(files):
            problem = f"files differ: {sorted(extra)[:3]}"
        bad += bool(problem)
        if problem:
            print(f"{trial.name}: {problem}", flush=True)
        shutil.rmtree(place)
        number += 1
    print(f"{struck} kills of {', '.join(NAMES)}: {number - bad} of {number} left the old or the new", flush=True)
    return struck, bad


def quiet_child(words: list[str], work: Path, main: Callable[[list[str]], int]) -> int:
    """`clipcil` in a forked process; its output goes to a file that the next one overwrites."""
    process = os.fork()
    if process:
        return process
    os.chdir(work)
    log = os.open(work / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(log, number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os._exit(main(words))

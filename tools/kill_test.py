"""Kill commands with SIGKILL at random moments, give them again, and compare with commands never killed.

    python tools/kill_test.py --kills 100
    python tools/kill_test.py --kills 10 --what runs --methods dmc-ot,rapf --seed 7

A run is killed and resumed until it ends, and must end with the same bytes as a run never stopped. The other commands
that write (learn, forget, rename, export, report, bench) are a third of the kills: each leaves what was there before or
what was to be there after, and given again it ends with the same files. Exit code 1 if anything differs.
"""

import argparse
import dataclasses
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from PIL import Image

SAME = ("config.toml", "results.json", "matrix.csv", "predictions.csv", "steps.jsonl")
CLASSES = 6
PATIENCE = 300
"""Seconds after which a process is ended, by SIGALRM."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="how many kills in all")
    parser.add_argument("--what", choices=("all", "runs", "commands"), default="all", help="what is killed")
    parser.add_argument("--methods", default="all", help="names with commas between, or all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    given = parser.parse_args()
    import_all()
    from clipcil.methods.registry import methods

    names = sorted(methods()) if given.methods == "all" else given.methods.split(",")
    commands = {"all": given.kills // 3, "runs": 0, "commands": given.kills}[given.what]
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="clipcil-kill-") as name:
        work = Path(name)
        write_pictures(work / "pictures")
        os.environ["CLIPCIL_CACHE"] = str(work / "cache")
        bad = kill_commands(work, commands, chance) if commands else 0
        settings = {name: short_settings(name) for name in names}
        bad += kill_runs(work, settings, given.kills - commands, chance) if given.what != "commands" else 0
    return int(bad > 0)


def write_pictures(folder: Path) -> None:
    """A handful of the embedded pictures as files."""
    from clipcil.data.dataset import open_dataset

    data = open_dataset("emoji")
    for part, pictures in (("train", data.train), ("test", data.test)):
        for row, label in enumerate(pictures.labels.tolist()):
            if label < CLASSES:
                path = folder / part / data.classes[label] / f"{row:04d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pictures.image(row).save(path)


def short_settings(method: str) -> list[str]:
    """`--set stage1.epochs=3 stage1.batch_size=8 …` for every stage the method has."""
    from clipcil.methods.registry import find_method
    from clipcil.training.trainer import Training

    config = find_method(method).Config()
    stages = [field.name for field in dataclasses.fields(config) if isinstance(getattr(config, field.name), Training)]
    words = [word for name in stages for word in (f"{name}.epochs=3", f"{name}.steps=0", f"{name}.batch_size=8")]
    return ["--set", *words] if words else []


# -- runs -------------------------------------------------------------------------------------------------------------


def kill_runs(work: Path, settings: dict[str, list[str]], kills: int, chance: random.Random) -> int:
    """Kill and resume runs of each method in turn; returns how many ended with other bytes."""
    started, done, runs, bad = time.monotonic(), 0, 0, 0
    whole: dict[str, float] = {}
    while done < kills:
        name = list(settings)[runs % len(settings)]
        words = [name, "--data", "folder", "--data-root", str(work / "pictures"), "--increment", "2", *settings[name]]
        if name not in whole:
            os.environ["CLIPCIL_CACHE"] = str(work / "cache")
            since = time.monotonic()
            run(["run", *words, "--out", str(work / name)], work)
            whole[name] = time.monotonic() - since
        if runs % 3 == 0:  # one run in three with a new cache, so that preprocessing is killed as well
            os.environ["CLIPCIL_CACHE"] = str(work / f"cache-{runs}")
        most = min(kills - done, max(1, kills // len(settings)))  # so that every method gets its share
        cut = work / f"{name}-{runs}"
        count = kill_and_resume(work, cut, words, whole[name], most, chance)
        wrong = [file for file in SAME if (work / name / file).read_bytes() != (cut / file).read_bytes()]
        done, runs, bad = done + count, runs + 1, bad + bool(wrong)
        print(f"{name}: {count} kills, {f'DIFFERENT: {wrong}' if wrong else 'the same bytes'}", flush=True)
        shutil.rmtree(cut)
    took = f"{time.monotonic() - started:.0f} s"
    same = f"{runs - bad} of {runs} runs ended with the same bytes"
    print(f"{done} kills in {runs} runs of {len(whole)} methods, {took}: {same}")
    return bad


def kill_and_resume(work: Path, out: Path, words: list[str], seconds: float, most: int, chance: random.Random) -> int:
    """Kill and resume one run until a process ends by itself; returns the kills."""
    kills = 0
    while True:
        begun = (out / "config.toml").is_file()
        process = start(["run", "--resume", str(out)] if begun else ["run", *words, "--out", str(out)], work)
        if kills < most:
            if chance.random() < 0.8:  # most kills fall into learning, some into starting up
                while not (work / "stdout").stat().st_size and not has_ended(process):
                    time.sleep(0.005)
                time.sleep(chance.uniform(0, 0.6 * seconds))
            else:
                time.sleep(chance.uniform(0, 1))
        code = end(process, kill=kills < most)
        if code == 0:
            return kills
        if code != -signal.SIGKILL:
            sys.exit(f"clipcil run {words} ended with {code}: {(work / 'stderr').read_text()}")
        kills += 1


# -- other commands ---------------------------------------------------------------------------------------------------


def kill_commands(work: Path, kills: int, chance: random.Random) -> int:
    """Kill the commands in turn; returns how many left something wrong."""
    stock = work / "stock"
    write_colours(stock / "week1", red=("red", "darkred"), blue=("blue", "navy"))
    write_colours(stock / "week2", green=("green", "lime"))
    pictures = str(work / "pictures")
    run(["learn", str(stock / "model"), str(stock / "week1"), "--quiet", "--method", "simplecil"], work)
    words = ["run", "simplecil", "--data", "folder", "--data-root", pictures, "--tasks", "3"]
    run([*words, "--out", str(stock / "run")], work)
    grid = ["--methods", "simplecil", "--data", "folder", "--data-root", f"folder={pictures}", "--increment", "2"]
    commands = {
        "learn": ["learn", "model", str(stock / "week2"), "--quiet"],
        "forget": ["forget", "model", "blue", "--yes"],
        "rename": ["rename", "model", "blue", "navy blue"],
        "export": ["export", "model", "--out", "export"],
        "report": ["report", "run"],
        "bench": ["bench", *grid, "--out", "bench", "--quiet"],
    }
    after: dict[str, tuple[list[object], set[str], float]] = {}
    number = struck = bad = 0
    while struck < kills:
        name, words = list(commands.items())[number % len(commands)]
        if name not in after:
            since, place = time.monotonic(), copy_of(stock, work / f"whole-{name}")
            run(words, place)
            after[name] = model_state(place), files(place), time.monotonic() - since
        place = copy_of(stock, work / f"trial-{number}")
        before, (whole, names, seconds) = model_state(place), after[name]
        process = start(words, place)
        time.sleep(chance.uniform(0, 1.1 * seconds))
        struck += end(process, kill=True) == -signal.SIGKILL
        left, problem = model_state(place), ""
        if left not in (before, whole):
            problem = f"left something between: {left}"
        done = name in ("learn", "forget", "rename") and left == whole
        again = ["rename", "model", "red", "red"] if done and name == "learn" else words  # it would learn twice
        code = end(start(again, place))
        if code != (2 if done and name != "learn" else 0):  # forgotten or renamed already: it says so
            problem = f"given again it ended with {code}"
        elif model_state(place) != whole:
            problem = "given again it ended otherwise"
        elif extra := files(place) ^ names:
            problem = f"files differ: {sorted(extra)[:3]}"
        if problem:
            print(f"{name}: {problem}", flush=True)
        bad, number = bad + bool(problem), number + 1
        shutil.rmtree(place)
    print(f"{struck} kills of {', '.join(commands)}: {number - bad} of {number} left the old or the new", flush=True)
    return bad


def copy_of(stock: Path, place: Path) -> Path:
    for source in ("model", "run"):
        shutil.copytree(stock / source, place / source)
    return place


def model_state(place: Path) -> list[object]:
    """Names and weights of the model; an error where it is broken."""
    from clipcil.classifier.folder import load_model

    facts, _ = load_model(place / "model")
    return [[known.name for known in facts.known], facts.sha256]


def files(place: Path) -> set[str]:
    """Names of all files but output and those of an undo, without the checksums in names: checkpoints hold seconds."""
    found = (path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
    found = (name for name in found if not name.endswith(("previous.toml", "stdout", "stderr")))
    return {re.sub(r"-[0-9a-f]{12,64}\.safetensors$", ".safetensors", name) for name in found}


# -- processes --------------------------------------------------------------------------------------------------------


def import_all() -> None:
    """Import what commands import late; with one thread, because threads do not survive a fork."""
    import lightning_fabric  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import torch

    import clipcil.classifier.export
    import clipcil.experiment.experiment
    import clipcil.report.page  # noqa: F401
    from clipcil.methods.registry import methods

    methods()
    torch.set_num_threads(1)


def write_colours(folder: Path, **classes: tuple[str, ...]) -> None:
    """A folder of plain pictures for each class, named by their colours."""
    for name, colours in classes.items():
        (folder / name).mkdir(parents=True)
        for colour in colours:
            Image.new("RGB", (32, 32), colour).save(folder / name / f"{colour}.png")


def start(words: list[str], folder: Path) -> int:
    """Start `clipcil` with these words in `folder`, its output in the files `stdout` and `stderr` there.

    Returns the number of the process. It is forked from this one, which has imported everything already: a thousand
    take minutes.
    """
    files = [os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("stdout", "stderr")]
    process = os.fork()
    if process == 0:
        for number, file in enumerate(files, 1):
            os.dup2(file, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, encoding="utf-8") for number in (1, 2))
        signal.alarm(PATIENCE)
        os.chdir(folder)
        os._exit(_run(words))
    for file in files:
        os.close(file)
    return process


def _run(words: list[str]) -> int:
    from clipcil.cli import main

    code = 0
    try:
        main(words)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def end(process: int, kill: bool = False) -> int:
    """Wait for a process, killing it first if told to; returns its exit code, negative for a signal."""
    if kill:
        os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def has_ended(process: int) -> bool:
    """Whether a process has ended; `end` still gives its code."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def run(words: list[str], folder: Path) -> None:
    """Run a command that must succeed."""
    if code := end(start(words, folder)):
        sys.exit(f"clipcil {words} ended with {code}: {(folder / 'stderr').read_text()}")


if __name__ == "__main__":
    sys.exit(main())

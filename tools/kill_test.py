"""Kill runs with SIGKILL at random moments, resume them until they end, and compare with runs never stopped.

    python tools/kill_test.py --kills 100
    python tools/kill_test.py --kills 10 --what runs --methods dmc-ot,rapf --seed 7

Every run is a process of its own, forked from one that has imported everything, on a handful of the embedded pictures
written out as files. Most kills fall into learning, some into starting up. The files compared are those that a seed
decides. Exit code 1 if any of them differs by a byte. A third of the kills strikes the other commands that write
(learn, forget, rename, export, report, describe, bench): see `kill_commands`.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import random
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from kill_commands import kill_commands, quiet_child

SAME = ("config.toml", "results.json", "matrix.csv", "predictions.csv", "steps.jsonl")
CLASSES, INCREMENT, PATIENCE = 6, 2, 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="how many kills in all")
    parser.add_argument("--what", choices=("all", "runs", "commands"), default="all", help="what is killed")
    parser.add_argument("--methods", default="all", help="names with commas between, or all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of every stage")
    given = parser.parse_args()
    import lightning_fabric  # noqa: F401  (imported late by a run; here it is imported once for all)
    import torch

    import clipcil.experiment.experiment  # noqa: F401
    from clipcil.methods.registry import find_method, methods

    torch.set_num_threads(1)

    names = sorted(methods()) if given.methods == "all" else given.methods.split(",")
    settings = {name: short_settings(find_method(name).Config(), given.epochs) for name in names}
    with tempfile.TemporaryDirectory(prefix="clipcil-kill-") as work:
        write_pictures(Path(work) / "pictures")
        commands = {"all": given.kills // 3, "runs": 0, "commands": given.kills}[given.what]
        chance = random.Random(given.seed)
        bad = kill_others(Path(work), commands, chance) if commands else 0
        return int(bad > 0) | test(Path(work), settings, given.kills - commands, chance)


def kill_others(work: Path, kills: int, chance: random.Random) -> int:
    """Kill the other commands; returns how many left something wrong."""
    # Imported here, once, and not in every child.
    import clipcil.classifier.export
    import clipcil.report.page  # noqa: F401

    os.environ["CLIPCIL_CACHE"] = str(work / "cache")

    def end(process: int, kill: bool) -> int:
        if kill:
            os.kill(process, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    return kill_commands(work, kills, chance, lambda words: quiet_child(words, work, command), end)[1]


def test(work: Path, settings: dict[str, list[str]], kills: int, chance: random.Random) -> int:
    started, done, runs, bad = time.monotonic(), 0, 0, 0
    whole: dict[str, float] = {}
    while done < kills:
        name = list(settings)[runs % len(settings)]
        if name not in whole:
            whole[name] = learn(work, name, settings[name])
        most = min(kills - done, max(1, kills // len(settings)))  # so that every method gets its share
        cut = work / f"{name}-{runs}"
        # One run in three with a cache of its own, so that preprocessing is killed as well.
        cache = work / (f"cache-{runs}" if runs % 3 == 0 else "cache")
        count = kill_and_resume(work, cut, cache, name, settings[name], whole[name], most, chance)
        wrong = [file for file in SAME if (work / name / file).read_bytes() != (cut / file).read_bytes()]
        done, runs, bad = done + count, runs + 1, bad + bool(wrong)
        verdict = f"DIFFERENT: {', '.join(wrong)}" if wrong else "the same bytes"
        print(f"{name}: {count} kills, {verdict}", flush=True)
        shutil.rmtree(cut)
    if not runs:
        return 0
    print(
        f"{done} kills in {runs} runs of {len(whole)} methods, {time.monotonic() - started:.0f} s:"
        f" {runs - bad} of {runs} runs ended with the same bytes"
    )
    return 1 if bad else 0


def short_settings(config: object, epochs: int) -> list[str]:
    """`stage1.epochs=3 stage1.batch_size=8 …` for every stage the method has."""
    from clipcil.training.trainer import Training

    fields = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    stages = [name for name in fields if isinstance(getattr(config, name), Training)]
    return [word for name in stages for word in (f"{name}.epochs={epochs}", f"{name}.steps=0", f"{name}.batch_size=8")]


def write_pictures(folder: Path) -> None:
    from clipcil.data.dataset import open_dataset

    data = open_dataset("emoji")
    for part, pictures in (("train", data.train), ("test", data.test)):
        for row, label in enumerate(pictures.labels.tolist()):
            if label < CLASSES:
                path = folder / part / data.classes[label] / f"{row:04d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                file = io.BytesIO()
                pictures.image(row).save(file, "PNG")
                path.write_bytes(file.getvalue())


def learn(work: Path, name: str, words: list[str]) -> float:
    """The run that nobody stops; returns its seconds from the first line it prints to its end."""
    child = Child(work, work / "cache", ["run", name, "--out", str(work / name), *data(work), *word_list(words)])
    begun = child.wait_for_line()
    output = child.finish()
    if child.code:
        sys.exit(f"{name} failed: {output}")
    return time.monotonic() - begun


def kill_and_resume(
    work: Path, out: Path, cache: Path, name: str, words: list[str], seconds: float, most: int, chance: random.Random
) -> int:
    """Kill and resume until a process ends by itself; returns the kills."""
    kills = 0
    while True:
        begun = (out / "config.toml").is_file()
        what = ["--resume", str(out)] if begun else [name, "--out", str(out), *data(work), *word_list(words)]
        child = Child(work, cache, ["run", *what])
        if kills < most:
            if chance.random() < 0.8:
                child.wait_for_line()
                time.sleep(chance.uniform(0, 0.6 * seconds))
            else:
                time.sleep(chance.uniform(0, 1))
            kills += child.kill()
        output = child.finish()
        if child.code == 0:
            return kills
        if child.code != -signal.SIGKILL:
            sys.exit(f"{name}: a resumed run failed with code {child.code}: {output}")


class Child:
    """`clipcil …` in a process of its own, its output in a pipe."""

    def __init__(self, work: Path, cache: Path, words: list[str]) -> None:
        self.code: int | None = None
        self.output, end = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.environ["CLIPCIL_CACHE"] = str(cache)
            os.chdir(work)
            for number in (1, 2):
                os.dup2(end, number)
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            os._exit(command(words))
        os.close(end)

    def wait_for_line(self) -> float:
        """The moment at which it prints for the first time (or ends without)."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.output, selectors.EVENT_READ)
            selector.select(PATIENCE)
        return time.monotonic()

    def kill(self) -> bool:
        """SIGKILL, if it has not ended by itself."""
        done, status = os.waitpid(self.process, os.WNOHANG)
        if done:
            self.code = os.waitstatus_to_exitcode(status)
            return False
        os.kill(self.process, signal.SIGKILL)
        return True

    def finish(self) -> str:
        """Wait for its end; returns what it printed."""
        with open(self.output, errors="replace") as file:  # noqa: PTH123
            text = file.read()
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        return text


def command(words: list[str]) -> int:
    from clipcil.cli import main as clipcil

    try:
        clipcil(words)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def data(work: Path) -> list[str]:
    return ["--data", "folder", "--data-root", str(work / "pictures"), "--increment", str(INCREMENT)]


def word_list(words: list[str]) -> list[str]:
    return ["--set", *words] if words else []


if __name__ == "__main__":
    sys.exit(main())

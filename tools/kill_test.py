"""Kill runs with SIGKILL at random moments, resume them until they end, and compare with runs never stopped.

    python tools/kill_test.py --kills 50
    python tools/kill_test.py --kills 10 --methods dmc-ot,rapf --seed 7

Every run is a process of its own, `python -m clipcil run …`, on a handful of the embedded pictures written out as
files. Most kills fall into learning, some into starting up. The files compared are those that a seed decides. Exit code
1 if any of them differs by a byte.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import random
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SAME = ("config.toml", "results.json", "matrix.csv", "predictions.csv", "steps.jsonl")
CLASSES, INCREMENT, PATIENCE = 6, 2, 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="how many kills in all")
    parser.add_argument("--methods", default="all", help="names with commas between, or all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of every stage")
    given = parser.parse_args()
    from clipcil.methods.registry import find_method, methods

    names = sorted(methods()) if given.methods == "all" else given.methods.split(",")
    settings = {name: short_settings(find_method(name).Config(), given.epochs) for name in names}
    with tempfile.TemporaryDirectory(prefix="clipcil-kill-") as work:
        return test(Path(work), settings, given.kills, random.Random(given.seed))


def test(work: Path, settings: dict[str, list[str]], kills: int, chance: random.Random) -> int:
    write_pictures(work / "pictures")
    started, done, runs, bad = time.monotonic(), 0, 0, 0
    whole: dict[str, float] = {}
    while done < kills:
        name = list(settings)[runs % len(settings)]
        if name not in whole:
            whole[name] = learn(work, name, settings[name])
        most = min(kills - done, -(-kills // len(settings)))  # so that every method gets its share
        cut = work / f"{name}-{runs}"
        count = kill_and_resume(work, cut, name, settings[name], whole[name], most, chance)
        wrong = [file for file in SAME if (work / name / file).read_bytes() != (cut / file).read_bytes()]
        done, runs, bad = done + count, runs + 1, bad + bool(wrong)
        verdict = f"DIFFERENT: {', '.join(wrong)}" if wrong else "the same bytes"
        print(f"{name}: {count} kills, {verdict}", flush=True)
        shutil.rmtree(cut)
    print(
        f"{done} kills in {runs} runs of {len(whole)} methods, {time.monotonic() - started:.0f} s:"
        f" {runs - bad} of {runs} runs ended with the same bytes"
    )
    return 1 if bad else 0


def short_settings(config: object, epochs: int) -> list[str]:
    """`stage1.epochs=3 stage1.batch_size=8 …` for every stage the method has."""
    from clipcil.methods.training import Training

    fields = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    stages = [name for name in fields if isinstance(getattr(config, name), Training)]
    return [word for name in stages for word in (f"{name}.epochs={epochs}", f"{name}.batch_size=8")]


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
    what = ["run", name, "--out", str(work / name), *data(work), *word_list(words)]
    child = start(work, work / f"cache-{name}", what)
    begun = wait_for_line(child)
    output = child.communicate(timeout=PATIENCE)[0]
    if child.returncode:
        sys.exit(f"{name} failed: {output}")
    return time.monotonic() - begun


def kill_and_resume(
    work: Path, out: Path, name: str, words: list[str], seconds: float, most: int, chance: random.Random
) -> int:
    """Kill and resume until a process ends by itself; returns the kills."""
    cache = work / f"cache-{out.name}"  # its own: preprocessing is to be killed as well
    kills = 0
    while True:
        begun = (out / "config.toml").is_file()
        what = ["--resume", str(out)] if begun else [name, "--out", str(out), *data(work), *word_list(words)]
        child = start(work, cache, ["run", *what])
        if kills < most:
            if chance.random() < 0.8:
                wait_for_line(child)
                time.sleep(chance.uniform(0, 0.6 * seconds))
            else:
                time.sleep(chance.uniform(0, 3))
            if child.poll() is None:
                child.kill()
                kills += 1
        output = child.communicate(timeout=PATIENCE)[0]
        if child.returncode == 0:
            shutil.rmtree(cache, ignore_errors=True)
            return kills
        if child.returncode > 0:
            sys.exit(f"{name}: a resumed run failed with code {child.returncode}: {output}")


def start(work: Path, cache: Path, words: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "CLIPCIL_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "clipcil", *words],
        cwd=work,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_line(child: subprocess.Popen[str]) -> float:
    """The moment at which the child prints for the first time (or ends without)."""
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        selector.select(PATIENCE)
    return time.monotonic()


def data(work: Path) -> list[str]:
    return ["--data", "folder", "--data-root", str(work / "pictures"), "--increment", str(INCREMENT)]


def word_list(words: list[str]) -> list[str]:
    return ["--set", *words] if words else []


if __name__ == "__main__":
    sys.exit(main())

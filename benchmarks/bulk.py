"""Predicting 20,000 pictures on Ray: `python -m benchmarks.bulk [--pictures 20000] [--actors 2] [--part 1000]`.

The pictures are the embedded ones with small changes (shifts of colour), written to a temporary folder. The job is
killed when a third of its parts are done and given again. Printed: pictures per second, the driver's memory at the
start and its peak, and whether every picture has exactly one answer, equal to that of `predict` in one process.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image, ImageEnhance

import clipcil
from clipcil.data.dataset import open_dataset

JOB = """
import resource, sys
from pathlib import Path
from clipcil.classifier import bulk
from clipcil.cluster import connect
model, source, out, actors, part = sys.argv[1:]
bulk.PART = int(part)
connect(None, num_cpus=int(actors))
memory = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print("start", memory(), flush=True)
def tell(done, total):
    if done % 5 == 0 or done == total:
        print(done, total, memory(), flush=True)
print(bulk.predict_on_ray(Path(model), Path(source), Path(out), actors=int(actors), on_progress=tell))
"""


def make(root: Path, count: int) -> None:
    data, chance = open_dataset("emoji"), random.Random(0)
    images = [data.test.image(row) for row in range(len(data.test))]
    for number in range(count):
        image: Image.Image = ImageEnhance.Color(images[number % len(images)]).enhance(0.5 + chance.random())
        folder = root / f"{number // 1000:03d}"
        folder.mkdir(exist_ok=True, parents=True)
        image.save(folder / f"{number:06d}.png", compress_level=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=20_000)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--part", type=int, default=1000, help="pictures of a part")
    given = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own 15 would leave its workers behind whatever else runs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder / "source", given.pictures)
        model = clipcil.Classifier("simplecil")
        model.learn(open_dataset("emoji"), hold_out=False)
        model.save(folder / "model")
        words = [sys.executable, "-c", JOB, str(folder / "model"), str(folder / "source"), str(folder / "out")]
        words += [str(given.actors), str(given.part)]
        parts = -(-given.pictures // given.part)
        first = subprocess.Popen(words, start_new_session=True)
        while len(list((folder / "out").glob("part-*.parquet"))) < max(1, parts // 3):
            time.sleep(0.5)
        os.killpg(first.pid, signal.SIGKILL)
        before = len(list((folder / "out").glob("part-*.parquet")))
        print(f"killed with {before} of {parts} parts done")
        start = time.perf_counter()
        subprocess.run(words, check=True)
        seconds = time.perf_counter() - start
        done = (parts - before) * given.part
        print(
            f"continued: {done} pictures in {seconds:.0f} s, {done / seconds:.0f} a second with {given.actors} actors"
        )
        check(folder, model, given.pictures)


def check(folder: Path, model: clipcil.Classifier, count: int) -> None:
    import pyarrow.parquet as pq

    rows = [row for file in sorted((folder / "out").glob("part-*.parquet")) for row in pq.read_table(file).to_pylist()]
    paths = {row["path"] for row in rows}
    sample = rows[:: max(1, count // 500)]
    same = sum(
        prediction.names == row["classes"]
        for row, (_, prediction) in zip(sample, model.predict_stream([row["path"] for row in sample]), strict=True)
    )
    print(f"{len(rows)} answers for {len(paths)} pictures of {count}; {same} of {len(sample)} as in one process")


if __name__ == "__main__":
    main()

"""S8: 16 clients ask a server at once: pictures together in batches, and the same server with batches of one.

Both servers run at the same time and are asked in turn, so that a busy moment of the machine falls on both. Each client
is a connection that sends a picture, waits for the answer and sends the next.

`python -m benchmarks.s8_serve_load MINUTES` asks one server for a long time, while a class is taught and taken back
again and again: every answer must be one of the model before or after a lesson, and memory must not grow.
"""

import io
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np

from benchmarks.harness import Row, duration
from benchmarks.s3_predict import taught
from clipcil.data.dataset import open_dataset

CLIENTS = 16
CODE = """
import sys
from pathlib import Path
from clipcil.serve.answers import Limits
from clipcil.serve.server import serve_model
serve_model(Path(sys.argv[1]), "127.0.0.1", 0, False, None, None, "cpu", Limits(batch=int(sys.argv[2])))
"""


def run(quick: bool) -> list[Row]:
    rounds, each = (1, 2) if quick else (3, 4)
    pictures, batches = jpegs(32), {"theirs": 1, "ours": 32}
    seconds: dict[str, list[float]] = {side: [] for side in batches}
    rates: dict[str, list[float]] = {side: [] for side in batches}
    processor = dict.fromkeys(batches, 0.0)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        servers = {}
        for side, batch in batches.items():
            taught("strata", 10).save(Path(name) / side)
            servers[side] = stack.enter_context(serving(Path(name) / side, batch))
        answers = {side: ask(address, pictures[:1])[1][0] for side, (address, _) in servers.items()}
        for turn in range(rounds + 1):  # the first one warms up
            for side, (address, process) in servers.items():
                used, start = processor_seconds(process), time.perf_counter()
                found = load(address, pictures, each)
                if turn:
                    seconds[side] += found
                    rates[side].append(len(found) / (time.perf_counter() - start))
                    processor[side] += (processor_seconds(process) - used) / (len(found) * rounds)
    rate = {side: statistics.median(values) for side, values in rates.items()}
    p50, p99 = ({side: float(np.quantile(values, q)) for side, values in seconds.items()} for q in (0.5, 0.99))
    ratio = rate["ours"] / rate["theirs"]
    words = {
        side: f"p50 {duration(p50[side])}, p99 {duration(p99[side])}, {duration(processor[side])} of CPU a picture"
        for side in batches
    }
    return [
        Row(
            name="S8",
            step=f"{CLIENTS} clients of `clipcil serve`, one at a time and in batches",
            theirs=f"{rate['theirs']:.1f} a second",
            ours=f"{rate['ours']:.1f} a second",
            result=f"{ratio:.1f}×",
            goal="≥3×",
            met=ratio >= 3,
            error=max(abs(a - b) for a, b in zip(answers["ours"], answers["theirs"], strict=True)),
            tolerance=1e-4,
            note=f"one at a time: {words['theirs']}; in batches: {words['ours']}",
            details={"rate": rate, "p50": p50, "p99": p99, "processor": processor, "ratio": ratio},
        )
    ]


def jpegs(count: int, first: int = 0) -> list[bytes]:
    train = open_dataset("emoji").train
    files = [io.BytesIO() for _ in range(count)]
    for row, file in enumerate(files, first):
        train.image(row).resize((256, 256)).save(file, "JPEG")
    return [file.getvalue() for file in files]


@contextmanager
def serving(model: Path, batch: int) -> Iterator[tuple[str, int]]:
    """The address of a server on the model, and the number of its process."""
    command = [sys.executable, "-c", CODE, str(model), str(batch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://127.0.0.1:\d+", process.stdout.readline())
            assert found
            yield found[0], process.pid
        finally:
            process.terminate()


def processor_seconds(process: int) -> float:
    """Processor time of a process so far: it does not depend on what else the machine does."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(address: str, pictures: list[bytes], each: int) -> list[float]:
    """Seconds of every request of all clients."""
    own = [[pictures[(number + CLIENTS * turn) % len(pictures)] for turn in range(each)] for number in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as clients:
        return [seconds for found, _ in clients.map(lambda some: ask(address, some), own) for seconds in found]


def ask(address: str, pictures: list[bytes]) -> tuple[list[float], list[list[float]]]:
    """Send pictures one after the other; the seconds and the probabilities of each, in the order of the names."""
    seconds, answers = [], []
    with httpx.Client(base_url=address, timeout=300, trust_env=False) as client:
        for picture in pictures:
            start = time.perf_counter()
            answer = client.post("/api/predict?top=11", content=picture, headers={"Content-Type": "image/jpeg"})
            seconds.append(time.perf_counter() - start)
            classes = sorted(
                answer.raise_for_status().json()["predictions"][0]["classes"], key=lambda each: each["name"]
            )
            answers.append([each["probability"] for each in classes])
    return seconds, answers


def endure(minutes: float) -> dict[str, float]:
    """Ask and teach for some minutes; raises where an answer is an error or wrong."""
    pictures, seconds, lessons = jpegs(32), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as name:
        taught("strata", 10).save(Path(name))
        with serving(Path(name), 32) as (address, process), ThreadPoolExecutor(CLIENTS + 1) as threads:
            known = [ask(address, pictures)[1]]
            with taught_more(address):
                known.append(ask(address, pictures)[1])
            over = threading.Event()

            def keep_teaching() -> None:
                while not over.is_set():
                    start = time.perf_counter()
                    with taught_more(address):
                        lessons.append(time.perf_counter() - start)

            def keep_asking(first: int) -> None:
                number = first
                while not over.is_set():
                    some = [place % len(pictures) for place in range(number, number + 8)]
                    took, answers = ask(address, [pictures[place] for place in some])
                    for place, answer in zip(some, answers, strict=True):
                        right = next(model[place] for model in known if len(model[place]) == len(answer))
                        assert np.allclose(answer, right, atol=1e-4), (answer, right)
                    seconds.extend(took)
                    number += 8

            jobs = [threads.submit(keep_teaching), *(threads.submit(keep_asking, 2 * n) for n in range(CLIENTS))]
            memory, end = [], time.monotonic() + 60 * minutes
            while time.monotonic() < end and not any(job.done() for job in jobs):
                time.sleep(1)
                memory.append(resident(process))
            over.set()
            for job in jobs:
                job.result()
    tenth = len(memory) // 10
    first, last = (statistics.median(part) for part in (memory[tenth : 2 * tenth], memory[-tenth:]))
    p50, p99 = (float(np.quantile(seconds, q)) for q in (0.5, 0.99))
    found = {"minutes": minutes, "predictions": len(seconds), "lessons": len(lessons), "p50": p50, "p99": p99}
    return found | {"lesson": statistics.median(lessons), "first": first, "last": last, "growth": last / first - 1}


@contextmanager
def taught_more(address: str) -> Iterator[None]:
    """The model after a lesson about an eleventh class, which is undone at the end."""
    first = int((open_dataset("emoji").train.labels == 10).nonzero()[0])
    files = [("pictures", ("x.jpg", picture)) for picture in jpegs(6, first)]
    with httpx.Client(base_url=address, timeout=300, trust_env=False) as client:
        client.post("/api/waiting", data={"name": "thing more"}, files=files).raise_for_status()
        client.post("/api/lesson").raise_for_status()
        while (lesson := client.get("/api/lesson").raise_for_status().json())["state"] == "running":
            time.sleep(0.2)
        assert lesson["state"] == "done", lesson
        yield
        client.post("/api/undo").raise_for_status()


def resident(process: int) -> int:
    """MiB of memory that a process holds."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


if __name__ == "__main__":
    figures = endure(float(sys.argv[1]))
    print(", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    sys.exit(figures["growth"] > 0.05)

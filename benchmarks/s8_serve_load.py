"""S8: 16 clients ask a server at once: pictures together in batches, and the same server with batches of one.

Both servers run at the same time and are asked in turn, so that a busy moment of the machine falls on both. Each client
is a connection that sends a picture, waits for the answer and sends the next.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from benchmarks.harness import Row, duration
from clipcil.classifier.classifier import Classifier
from clipcil.data.dataset import open_dataset

CLIENTS = 16
CODE = """
import json, sys
from pathlib import Path
from clipcil.serve.answers import Limits
from clipcil.serve.server import serve_model
model, batch = json.loads(sys.argv[1])
serve_model(Path(model), "127.0.0.1", 0, False, None, None, "cpu", Limits(batch=batch))
"""


def run(quick: bool) -> list[Row]:
    rounds, each = (1, 2) if quick else (3, 4)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        pictures = _pictures(32)
        ports, processes = {}, {}
        for side, batch in (("theirs", 1), ("ours", 32)):
            folder = Path(name) / side
            _teach(folder)
            ports[side], processes[side] = stack.enter_context(_server(folder, batch))
        seconds: dict[str, list[float]] = {side: [] for side in ports}
        rates: dict[str, list[float]] = {side: [] for side in ports}
        answers = {side: _ask(port, pictures[0]) for side, port in ports.items()}
        processor = dict.fromkeys(ports, 0.0)
        for turn in range(rounds + 1):  # the first one warms up
            for side, port in ports.items():
                used = _processor_seconds(processes[side])
                start = time.perf_counter()
                found = _load(port, pictures, each)
                if turn:
                    seconds[side] += found
                    rates[side].append(len(found) / (time.perf_counter() - start))
                    processor[side] += (_processor_seconds(processes[side]) - used) / (len(found) * rounds)
    rate = {side: statistics.median(values) for side, values in rates.items()}
    p50, p99 = ({side: _quantile(values, q) for side, values in seconds.items()} for q in (0.5, 0.99))
    ratio = rate["ours"] / rate["theirs"]
    error = max(abs(a - b) for a, b in zip(answers["ours"], answers["theirs"], strict=True))
    words = {
        side: f"p50 {duration(p50[side])}, p99 {duration(p99[side])}, {duration(processor[side])} of CPU a picture"
        for side in ports
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
            error=error,
            tolerance=1e-4,
            note=f"one at a time: {words['theirs']}; in batches: {words['ours']}",
            details={"rate": rate, "p50": p50, "p99": p99, "processor": processor, "ratio": ratio},
        )
    ]


def _pictures(count: int) -> list[bytes]:
    train = open_dataset("emoji").train
    files = []
    for row in range(count):
        out = io.BytesIO()
        train.image(row).resize((256, 256)).save(out, "JPEG")
        files.append(out.getvalue())
    return files


def _teach(folder: Path) -> None:
    train = open_dataset("emoji").train
    names = {
        f"thing {c}": [train.image(int(row)) for row in torch.nonzero(train.labels == c).flatten()] for c in range(10)
    }
    model = Classifier()
    model.learn(names)
    model.save(folder)


@contextmanager
def _server(folder: Path, batch: int) -> Iterator[tuple[int, int]]:
    command = [sys.executable, "-c", CODE, json.dumps([str(folder), batch])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ.copy())
    try:
        assert process.stdout is not None
        found = re.search(r"http://127.0.0.1:(\d+)", process.stdout.readline())
        assert found
        yield int(found[1]), process.pid
    finally:
        process.terminate()
        process.wait(30)


def _processor_seconds(process: int) -> float:
    """Processor time of a process so far: it does not depend on what else the machine does."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _load(port: int, pictures: list[bytes], each: int) -> list[float]:
    """Seconds of every request of all clients."""
    seconds: list[float] = []

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        for turn in range(each):
            start = time.perf_counter()
            _post(connection, pictures[(number + CLIENTS * turn) % len(pictures)])
            seconds.append(time.perf_counter() - start)
        connection.close()

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    return seconds


def _post(connection: http.client.HTTPConnection, picture: bytes) -> list[float]:
    connection.request("POST", "/api/predict?top=10", picture, {"Content-Type": "image/jpeg"})
    found = json.loads(connection.getresponse().read())["predictions"][0]
    return [each["probability"] for each in sorted(found["classes"], key=lambda each: str(each["name"]))]


def _ask(port: int, picture: bytes) -> list[float]:
    return _post(http.client.HTTPConnection("127.0.0.1", port, timeout=300), picture)


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]

"""A real server in a process of its own, and real HTTP to talk to it."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

CODE = """
import json, sys
from pathlib import Path
from clipcil.serve.answers import Limits
from clipcil.serve.server import serve_model
model, host, port, method, limits = json.loads(sys.argv[1])
serve_model(Path(model), host, port, False, method, None, "cpu", Limits(**limits))
"""
SECONDS = 120.0


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int
    address: str
    client: httpx.Client

    def call(self, method: str, path: str, body: Any = None, kind: str = "", **query: Any) -> httpx.Response:
        """One request; a mapping is sent as JSON, and bytes as they are."""
        if isinstance(body, Mapping):
            return self.client.request(method, path, json=body, params=query or None)
        headers = {"Content-Type": kind} if kind else {}
        return self.client.request(method, path, content=body, headers=headers, params=query or None)

    def add(self, name: str, pictures: Sequence[tuple[str, bytes]]) -> httpx.Response:
        return self.client.post("/api/waiting", data={"name": name}, files=form(pictures))

    def teach(self, classes: Mapping[str, Sequence[bytes]]) -> dict[str, Any]:
        """A whole lesson; returns its last state."""
        for name, pictures in classes.items():
            found = self.add(name, [(f"{i}.png", picture) for i, picture in enumerate(pictures)])
            assert found.status_code == 201, found.text
        assert self.call("POST", "/api/lesson").status_code == 202
        return self.wait_for_lesson()

    def wait_for_lesson(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while (state := self.call("GET", "/api/lesson").json())["state"] == "running":
            assert time.monotonic() < end, state
            time.sleep(0.1)
        return dict(state)

    def predict(self, picture: bytes, top: int = 5) -> dict[str, Any]:
        answer = self.call("POST", "/api/predict", picture, "image/png", top=top)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["predictions"][0])

    @property
    def model(self) -> dict[str, Any]:
        return dict(self.call("GET", "/api/model").json())

    @property
    def classes(self) -> list[str]:
        return [each["name"] for each in self.model["classes"]]

    @property
    def waiting(self) -> dict[str, int]:
        """Numbers of the pictures that wait."""
        found = self.call("GET", "/api/waiting").json()["classes"]
        return {each["name"]: len(each["pictures"]) for each in found}

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def running(
    model: Path, cache: Path, *, host: str = "127.0.0.1", port: int = 0, method: str | None = None, **limits: int
) -> Iterator[Server]:
    """A server on `model`, stopped at the end as Ctrl-C stops it."""
    command = [sys.executable, "-c", CODE, json.dumps([str(model), host, port, method, limits])]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(cache)
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        found = re.search(r"at (http://\S+:(\d+)\S*)", line)
        assert found, line + process.stderr.read()
        token = re.search(r"token=(\S+)", line)
        headers = {"Authorization": f"Bearer {token[1]}"} if token else {}
        base = f"http://127.0.0.1:{found[2]}"
        with httpx.Client(base_url=base, headers=headers, timeout=SECONDS, trust_env=False) as client:
            yield Server(process, int(found[2]), found[1], client)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL or not complaints, complaints


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "CLIPCIL_CACHE": str(cache), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def form(pictures: Sequence[tuple[str, bytes]]) -> list[tuple[str, tuple[str, bytes]]]:
    """Pictures under their file names, as form fields."""
    return [("pictures", each) for each in pictures]


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()

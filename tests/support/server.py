"""A real server in a process of its own, and real HTTP to talk to it."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from PIL import Image

CODE = """
import json, sys
from pathlib import Path
from clipcil.serve.guard import Limits
from clipcil.serve.server import serve_model
model, host, method, limits = json.loads(sys.argv[1])
serve_model(Path(model), host, 0, False, method, None, "cpu", Limits(**limits))
"""
SECONDS = 120.0


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int
    address: str
    headers: dict[str, str] = field(default_factory=dict)

    def call(
        self, method: str, path: str, body: bytes | Mapping[str, Any] | None = None, kind: str = "", **query: Any
    ) -> Answer:
        """One request on a connection of its own."""
        headers = dict(self.headers)
        if isinstance(body, Mapping):
            body, kind = json.dumps(body).encode(), "application/json"
        if kind:
            headers["Content-Type"] = kind
        return self.raw(method, f"{path}?{urlencode(query)}" if query else path, body, headers)

    def raw(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def add(self, name: str, pictures: Sequence[tuple[str, bytes]]) -> Answer:
        body, kind = form(name, pictures)
        return self.call("POST", "/api/waiting", body, kind)

    def teach(self, classes: Mapping[str, Sequence[bytes]]) -> dict[str, Any]:
        """A whole lesson; returns its last state."""
        for name, pictures in classes.items():
            assert self.add(name, [(f"{i}.png", picture) for i, picture in enumerate(pictures)]).status == 201
        assert self.call("POST", "/api/lesson").status == 202
        return self.wait_for_lesson()

    def wait_for_lesson(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while (state := self.call("GET", "/api/lesson").json)["state"] == "running":
            assert time.monotonic() < end, state
            time.sleep(0.1)
        return dict(state)

    def predict(self, picture: bytes, top: int = 5) -> dict[str, Any]:
        answer = self.call("POST", "/api/predict", picture, "image/png", top=top)
        assert answer.status == 200, answer.body
        return dict(answer.json["predictions"][0])

    @property
    def classes(self) -> list[str]:
        return [each["name"] for each in self.call("GET", "/api/model").json["classes"]]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def running(
    model: Path, cache: Path, *, host: str = "127.0.0.1", method: str | None = None, **limits: int
) -> Iterator[Server]:
    """A server on `model`, stopped at the end as Ctrl-C stops it."""
    given = json.dumps([str(model), host, method, limits])
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(cache),
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        found = re.search(r"at (http://\S+:(\d+)\S*)", line)
        assert found, line + process.stderr.read()
        yield Server(process, int(found[2]), found[1])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL or not complaints, complaints


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "CLIPCIL_CACHE": str(cache), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def form(name: str, pictures: Sequence[tuple[str, bytes]]) -> tuple[bytes, str]:
    """A form with a class name and pictures under their file names."""
    mark = secrets.token_hex(16)
    out = io.BytesIO()
    out.write(f'--{mark}\r\nContent-Disposition: form-data; name="name"\r\n\r\n{name}\r\n'.encode())
    for title, content in pictures:
        head = f'--{mark}\r\nContent-Disposition: form-data; name="pictures"; filename="{title}"\r\n'
        out.write(f"{head}Content-Type: image/png\r\n\r\n".encode() + content + b"\r\n")
    out.write(f"--{mark}--\r\n".encode())
    return out.getvalue(), f"multipart/form-data; boundary={mark}"


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()

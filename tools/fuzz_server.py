"""A server that answers like a language model's, well or badly; the first word of the path says how."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "sk-fuzz-secret"
KINDS = (
    "good",
    "good",
    "good",
    "good",
    "good",
    "401",
    "500",
    "echo",
    "html",
    "deep",
    "half",
    "empty",
    "huge",
    "moved",
    "cut",
    "drip",
    "odd",
)


def chat(content: str) -> bytes:
    return json.dumps({"choices": [{"message": {"content": content}}]}).encode()


ANSWERS = {
    "good": chat('{"first": ["long ears"], "second": ["a short tail"]}'),
    "html": b"<html>",
    "deep": chat("{" + "[" * 50_000),
    "half": chat('{"first": ["a \\ud800"], "second": ["b"]}'),
    "empty": b"",
    "huge": b'{"choices": "' + b"x" * 3_000_000 + b'"}',
    "odd": chat('{"first": [1, null, {}], "second": "x"}'),
    "401": json.dumps({"error": {"message": f"wrong key {KEY}\x1b[2J"}}).encode(),
}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        kind = self.path.split("/")[1]
        code = {"401": 401, "echo": 403, "500": 500, "moved": 302}.get(kind, 200)
        reason = f"no {KEY}" if kind == "echo" else None
        body = ANSWERS.get(kind, b"")
        self.send_response(code, reason)
        if kind == "moved":
            self.send_header("Location", "http://127.0.0.1:1/")
        if kind != "drip":
            self.send_header("Content-Length", str(len(body) + (100 if kind == "cut" else 0)))
        self.end_headers()
        try:
            self.wfile.write(body)
            for _ in range(200 if kind == "drip" else 0):
                self.wfile.write(b" ")
                time.sleep(0.05)
        except OSError:
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        """Nothing is printed."""


def start() -> str:
    """Serve from a thread of this process; returns the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"

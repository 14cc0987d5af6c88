"""Nothing goes to the network unless told, no key reaches the terminal, and no server keeps a command waiting."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import clipcil
from clipcil.cli import main
from clipcil.clip.loading import download, is_hub_id, pinned
from clipcil.descriptions.client import Endpoint, ask_for_descriptions, parse_answer
from clipcil.errors import UserError
from clipcil.network import allow_downloads, on_behalf_of_a_folder
from support.finished_runs import write_run
from support.lessons import plain, refused
from support.processes import start


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Connections that were tried; none goes through."""
    tried: list[str] = []

    def connect(self: socket.socket, address: Any) -> None:
        tried.append(str(address))
        raise OSError("no network in tests")

    def look_up(*args: Any, **kwargs: Any) -> Any:
        tried.append(str(args))
        raise OSError("no network in tests")

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return tried


def test_nothing_is_fetched_on_behalf_of_a_folder(
    asked: list[str],
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (saved / "model.toml").read_text()
    (saved / "model.toml").write_text(text.replace('backbone = "mini"', 'backbone = "stranger/private"'))
    plain("red")[0].save(tmp_path / "a.png")
    monkeypatch.setattr("clipcil.serve.server.serve_model", lambda folder, *rest: clipcil.load(folder))
    words_of = (["predict", str(saved), str(tmp_path / "a.png")], ["forget", str(saved), "red"], ["serve", str(saved)])
    for words in words_of:
        assert "--allow-download" in refused(capsys, *words)
    run = write_run(tmp_path / "run", "simplecil", tasks=2)
    values = json.loads((run / "results.json").read_text())
    values["config"]["run"] |= {"data": "hub", "data_options": {"repo": "stranger/private"}}
    (run / "results.json").write_text(json.dumps(values))
    main(["report", str(run)])
    assert "not on this machine" in (run / "report.html").read_text()
    assert not asked

    def fetch(repository: str, file: str, revision: str | None) -> str:
        asked.append(repository)
        raise OSError("no network in tests")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert "from the hub" in refused(capsys, "predict", str(saved), str(tmp_path / "a.png"), "--allow-download")
    assert "from the hub" in refused(capsys, "serve", str(saved), "--allow-download")
    assert asked == ["stranger/private"] * 2


def test_a_revision_is_pinned_and_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    calls: list[tuple[Any, ...]] = []

    def fetch(repository: str, file: str, revision: str | None, how: str = "fetched") -> str:
        calls.append((repository, revision, how))
        return str(tmp_path / "snapshots" / "0a1b2c" / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", functools.partial(fetch, how="looked for"))
    assert is_hub_id("owner/name@v1.0") and not is_hub_id("owner/name@") and not is_hub_id("a/b/c")
    folder = download("owner/name@v1.0")
    assert pinned("owner/name", folder) == "owner/name@0a1b2c"
    assert pinned("owner/name@v1.0", folder) == "owner/name@v1.0"
    with on_behalf_of_a_folder():
        download("owner/name")
    with allow_downloads(), on_behalf_of_a_folder():
        download("owner/name")
    assert list(dict.fromkeys(calls)) == [
        ("owner/name", "v1.0", "fetched"),
        ("owner/name", None, "looked for"),
        ("owner/name", None, "fetched"),
    ]


KEY = "sk-secret-0123456789"


class Server:
    """Answers every connection with the same bytes, or drop by drop."""

    def __init__(self, answer: bytes, drip: bool = False) -> None:
        self.asked = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"
        self.answer, self.drip = answer, drip
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self.talk, args=(connection,), daemon=True).start()

    def talk(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(65536)
            self.asked.set()
            connection.sendall(self.answer)
            while self.drip:
                connection.sendall(b" ")
                time.sleep(0.05)


def test_the_key_is_never_shown(tmp_path: Path) -> None:
    server = Server(f"HTTP/1.1 401 wrong key {KEY}\r\nContent-Length: 0\r\n\r\n".encode())
    with pytest.raises(UserError) as caught:
        ask_for_descriptions(["a", "b"], Endpoint(f"{server.url}?api-key=hidden", "m", KEY), tmp_path / "x.json")
    assert KEY not in str(caught.value) and "hidden" not in str(caught.value) and "401" in str(caught.value)
    for url in (f"http://me:{KEY}@localhost/v1", f"htp://me:{KEY}@x", f"http://x?{KEY}y\x07"):
        with pytest.raises(UserError) as caught:
            Endpoint(url, "m", "other")
        assert KEY not in str(caught.value)


@pytest.mark.parametrize("url", ["http://[::1", "http://x:99999999", "http://", "x", "http://a b", "http://\udcff"])
def test_a_bad_endpoint_is_one_line(url: str) -> None:
    with pytest.raises(UserError, match="is not an address"):
        Endpoint(url, "m")


def test_a_server_that_drips_is_given_up_on(tmp_path: Path) -> None:
    for head in (b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 400 no\r\n\r\n"):
        server = Server(head, drip=True)
        started = time.monotonic()
        with pytest.raises(UserError, match=r"takes too long|answered 400"):
            ask_for_descriptions(["a", "b"], Endpoint(server.url, "m", timeout=0.5, attempts=1), tmp_path / "x.json")
        assert time.monotonic() - started < 60


def test_describe_can_be_stopped_while_a_server_drips(tmp_path: Path) -> None:
    """Otherwise it would go on for the minute that a question may take, and ask again."""
    server = Server(b"HTTP/1.1 200 OK\r\n\r\n", drip=True)
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    child = start(tmp_path, "describe", "names.txt", "--endpoint", server.url, "--model", "m", "--out", "x.json")
    try:
        assert server.asked.wait(300), child.communicate(timeout=10)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=50)
    finally:
        child.kill()
    assert child.returncode == 130 and errors.count("\n") == 1 and "Traceback" not in errors, errors


def test_half_characters_in_an_answer_are_no_answer() -> None:
    inner = '{"first": ["a \\ud800"], "second": ["b"]}'
    text = json.dumps({"choices": [{"message": {"content": inner}}]})
    with pytest.raises(Exception, match="not the JSON"):
        parse_answer(text)

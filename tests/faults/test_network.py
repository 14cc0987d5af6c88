"""Nothing goes to the network unless told, no key reaches the terminal, and no server keeps a command waiting."""

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
from clipcil.clip.loading import HUB_ID, download, pinned
from clipcil.network import allow_downloads, on_behalf_of_a_folder
from support.finished_runs import write_run
from support.lessons import plain, refused
from support.processes import start


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Connections that were tried; none goes through."""
    tried: list[str] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        tried.append(str(args))
        raise OSError("no network in tests")

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


def test_nothing_is_fetched_on_behalf_of_a_folder(
    asked: list[str], saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (saved / "model.toml").read_text()
    (saved / "model.toml").write_text(text.replace('backbone = "mini"', 'backbone = "stranger/private"'))
    plain("red")[0].save(tmp_path / "a.png")
    monkeypatch.setattr("clipcil.serve.server.serve_model", lambda folder, *rest: clipcil.load(folder))
    words_of = (
        ["predict", str(saved), str(tmp_path / "a.png")],
        ["forget", str(saved), "red", "--yes"],
        ["serve", str(saved)],
    )
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
    calls: list[tuple[Any, ...]] = []

    def fetch(repository: str, file: str, revision: str | None, how: str = "fetched") -> str:
        calls.append((repository, revision, how))
        return str(tmp_path / "snapshots" / "0a1b2c" / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", functools.partial(fetch, how="looked for"))
    assert HUB_ID.fullmatch("owner/name@v1.0") and not HUB_ID.fullmatch("owner/name@")
    weights = download("owner/name@v1.0")
    assert pinned("owner/name", weights) == "owner/name@0a1b2c"
    assert pinned("owner/name@v1.0", weights) == "owner/name@v1.0"
    with on_behalf_of_a_folder():
        download("owner/name")
    with allow_downloads(), on_behalf_of_a_folder():
        download("owner/name")
    assert list(dict.fromkeys(calls)) == [
        ("owner/name", "v1.0", "fetched"),
        ("owner/name", None, "looked for"),
        ("owner/name", None, "fetched"),
    ]


def drip(listener: socket.socket, asked: threading.Event) -> None:
    """Answer one request without an end."""
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        connection.recv(65536)
        asked.set()
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b" ")
            time.sleep(0.05)


def test_describe_can_be_stopped_while_a_server_drips(tmp_path: Path) -> None:
    """Otherwise it would wait for the minute that a question may take, and ask again."""
    listener, asked = socket.create_server(("127.0.0.1", 0)), threading.Event()
    threading.Thread(target=drip, args=(listener, asked), daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    child = start(tmp_path, "describe", "names.txt", "--endpoint", url, "--model", "m", "--out", "x.json")
    try:
        assert asked.wait(300), child.communicate(timeout=10)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=50)
    finally:
        child.kill()
    assert child.returncode == 130 and errors.count("\n") == 1 and "Traceback" not in errors, errors

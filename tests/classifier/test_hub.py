"""Models to and from a hub: a small server stands for Hugging Face's."""

import base64
import functools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import clipcil
from clipcil.cli import main
from clipcil.errors import UserError
from support.lessons import plain, refused


class Hub(BaseHTTPRequestHandler):
    """The requests that a push and a pull make; what was pushed is in `server.files`."""

    server: Any

    def reply(self, value: Any = None, status: int = 200, data: bytes | None = None, **headers: str) -> None:
        body = json.dumps(value).encode() if data is None else data
        self.send_response(status)
        for key, text in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.headers.get("Authorization") != "Bearer hf_right":
            self.reply({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            self.server.private = json.loads(text).get("private", json.loads(text).get("visibility") == "private")
            self.reply({"url": f"{self.server.address}/me/birds"})
        elif self.path == "/api/validate-yaml":
            self.reply({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(text)["files"]
            ]
            self.reply({"files": files})
        else:
            for line in map(json.loads, text.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                if line["key"] == "deletedFile":
                    del self.server.files[line["value"]["path"]]
            self.reply({"commitUrl": f"{self.server.address}/me/birds/commit/1", "commitOid": "1", "success": True})

    def do_GET(self) -> None:
        if "/tree/" in self.path:
            rows = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in self.server.files]
            self.reply(rows, Content_Type="application/json")
        elif (name := self.path.rpartition("/")[2]) in self.server.files:
            data = self.server.files[name]
            self.reply(data=data, ETag=f'"{name}-{len(data)}"', X_Repo_Commit="a" * 40)
        else:
            self.reply({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *args: object) -> None:
        """No line for a request."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.private = {}, None
    server.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.HfApi", functools.partial(huggingface_hub.HfApi, endpoint=server.address))
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    server.server_close()


def taught(folder: str, *colours: str) -> clipcil.Classifier:
    model = clipcil.Classifier("simplecil")
    model.learn({colour: plain(colour) for colour in colours})
    model.save(folder)
    return model


def test_a_model_goes_to_the_hub_and_comes_back(hub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    taught("model", "red", "blue")
    main(["push", "model", "me/birds"])
    first = dict(hub.files)
    assert f"{hub.address}/me/birds/commit/1" in capsys.readouterr().out and hub.private
    assert first == {path.name: path.read_bytes() for path in Path("model").iterdir() if path.is_file()}
    taught("other", "green", "white")
    main(["pull", "me/birds@v1.0", "other"])
    main(["pull", "me/birds", "new"])
    assert clipcil.load("other").classes == clipcil.load("new").classes == ["red", "blue"]
    main(["undo", "other"])
    assert clipcil.load("other").classes == ["green", "white"]
    main(["push", "other", "me/birds", "--public"])
    weights = [name for name in hub.files if name.startswith("weights-")]
    assert len(weights) == 1 and weights[0] not in first, "the weights before are removed"
    assert not hub.private and "previous.toml" not in hub.files


def test_what_a_hub_refuses_or_a_stranger_puts_there_is_one_line(
    hub: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "'me/nothing' on the hub" in refused(capsys, "pull", "me/nothing", "new")
    taught("model", "red", "blue")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "'me/birds' on the hub" in refused(capsys, "push", "model", "me/birds")
    hub.files |= {path.name: path.read_bytes() for path in Path("model").iterdir()}
    name = next(name for name in hub.files if name.startswith("weights-"))
    hub.files[name] = hub.files[name][:-1] + b"x"
    assert f"hub: {name} does not match its checksum\n" in refused(capsys, "pull", "me/birds", "new")
    hub.files["model.toml"] = hub.files["model.toml"].replace(name.encode(), b"../../evil.safetensors")
    assert "'weights'" in refused(capsys, "pull", "me/birds", "new")
    assert not Path("new").exists()
    with pytest.raises(UserError, match="holds no model"):
        clipcil.load("new")
    Path("pictures").mkdir()
    Path("pictures", "a.txt").write_text("the user's own")
    assert "pictures" in refused(capsys, "pull", "me/birds", "pictures")

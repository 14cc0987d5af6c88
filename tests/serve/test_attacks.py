"""What strangers and careless programs may try: each is refused in one line, and the model is as it was."""

import io
import re
import socket
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from PIL import Image

from clipcil.errors import UserError
from clipcil.serve.api import unpack_model
from support.server import Server, form, png, running

SMALL = {
    "picture_bytes": 60_000,
    "request_bytes": 400_000,
    "request_pictures": 6,
    "queued_pictures": 4,
    "model_bytes": 30_000_000,
    "connections": 8,
}
NAMES = (b'""', b'["x"]', b'"' + b"x" * 301 + b'"', b'"\\ud800"')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacked")


@pytest.fixture(scope="module")
def server(folder: Path, emoji: dict[str, list[bytes]]) -> Iterator[Server]:
    """A taught model on every address of this machine, so with a token, and with small limits."""
    with running(folder / "model", folder / "cache", host="0.0.0.0", method="simplecil", **SMALL) as found:
        assert found.teach({"fox": emoji["fox"][:2], "owl": emoji["owl"][:2]})["state"] == "done"
        yield found


def test_the_token_is_needed(server: Server) -> None:
    assert server.client.get("/api/model", headers={"Authorization": "Bearer x"}).status_code == 401


def begin_upload(server: Server, size: int, *start: str) -> socket.socket:
    """A connection over which a body of `size` bytes is announced, and only its start is sent."""
    client = socket.create_connection(("127.0.0.1", server.port))
    head = {"Host": "localhost", "Authorization": server.client.headers["Authorization"], "Content-Length": size}
    lines = ["POST /api/predict HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", *start]
    client.sendall("\r\n".join(lines).encode())
    return client


def test_too_large_uploads(server: Server, emoji: dict[str, list[bytes]]) -> None:
    with begin_upload(server, 10**12, "") as client:
        assert client.recv(100).startswith(b"HTTP/1.1 413"), "refused before a byte of it is sent"
    large = png(Image.effect_noise((300, 300), 90))
    bomb = png(Image.new("1", (10_001, 10_000)))
    assert len(bomb) < SMALL["picture_bytes"] < len(large)
    for picture, told in ((large, "MB"), (bomb, "too large to decode")):
        assert told in server.add("fox", [("x.png", picture)]).json()["pictures"][0]["broken"]
        assert told in server.predict(picture)["error"]
    for path in ("/api/waiting", "/api/predict"):
        answer = server.client.post(path, data={"name": "fox"}, files=form([("x.png", b"x")] * 7))
        assert answer.status_code == 400 and "files" in answer.json()["error"].lower()
    server.call("DELETE", "/api/waiting", name="fox")
    with begin_upload(server, 1000, "abc"):
        pass  # a client that stops in the middle is forgotten
    assert server.predict(emoji["fox"][0])["classes"][0]["name"] == "fox"


def test_names_are_text_and_never_paths(server: Server, folder: Path, emoji: dict[str, list[bytes]]) -> None:
    before = {path for path in folder.rglob("*") if "cache" not in path.parts}
    evil = "../../evil/<b>x</b>"
    answer = server.add(evil, [("../../../up.png", emoji["rocket"][0]), ("C:\\\\boot\\\\x.png", emoji["rocket"][1])])
    assert answer.status_code == 201 and answer.json()["name"] == evil
    assert [each["title"] for each in answer.json()["pictures"]] == ["up.png", "x.png"]
    staged = [path.name for path in (folder / "cache" / "serve").rglob("*") if path.is_file()]
    assert len(staged) == 4 and all(re.fullmatch(r"[0-9a-f]{24}\.(picture|jpg)", name) for name in staged)
    assert {path for path in folder.rglob("*") if "cache" not in path.parts} == before
    for id in ("../../model/model.toml", "..", "%2e%2e", f"{answer.json()['pictures'][0]['id']}/../x"):
        assert server.call("GET", "/api/waiting/thumbnail", id=id).status_code == 404
        assert server.call("DELETE", "/api/waiting", id=id).status_code == 404
    for path in ("/static/%2e%2e/api.py", "/static//etc/passwd", "/static/..%2fapi.py"):
        assert server.call("GET", path).status_code == 404, path
    assert server.call("POST", "/api/lesson").status_code == 202 and server.wait_for_lesson()["state"] == "done"
    assert evil in server.classes
    ours = re.compile(r"model\.toml|previous\.toml|README\.md|\.lock|weights-[0-9a-f]{12}\.safetensors")
    assert all(ours.fullmatch(path.name) for path in (folder / "model").iterdir())
    assert server.call("DELETE", "/api/classes", name=evil).status_code == 200


def test_a_full_queue_says_when_to_come_again(server: Server, emoji: dict[str, list[bytes]]) -> None:
    answer = server.client.post("/api/predict", files=form([("x.png", emoji["fox"][0])] * 5))
    assert answer.status_code == 503 and int(answer.headers["Retry-After"]) >= 1
    assert server.client.post("/api/predict", files=form([("x.png", emoji["fox"][0])] * 4)).status_code == 200


def test_connections_are_bounded(server: Server) -> None:
    with ExitStack() as stack:
        codes = []
        while 503 not in codes:
            assert len(codes) <= SMALL["connections"]
            codes.append(stack.enter_context(server.client.stream("GET", "/api/events")).status_code)
        assert codes[:2] == [200, 200]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        *(("PATCH", "/api/classes?name=fox", b'{"name": %s}' % name) for name in NAMES),
        *(("PATCH", "/api/classes?name=fox", body) for body in (b"[1]", b"[" * 50_000)),
        ("PATCH", "/api/classes", b'{"name": "x"}'),
        ("PATCH", "/api/settings", b'{"keep_small_pictures": "yes"}'),
        ("POST", "/api/predict?top=0", b"x"),
        ("POST", "/api/predict?top=1e9", b"x"),
        ("POST", "/api/waiting", b"x"),
        ("DELETE", "/api/classes?name=nobody", b""),
        ("GET", "/api/export?format=pickle", b""),
        ("POST", "/api/model/upload", b"no zip"),
        ("POST", "/api/model/upload", b""),
    ],
)
def test_nonsense_gets_one_line(server: Server, method: str, path: str, body: bytes) -> None:
    answer = server.call(method, path, body)
    assert answer.status_code == 400 and "\n" not in answer.json()["error"] and len(answer.json()["error"]) < 400
    assert server.classes == ["fox", "owl"]


def packed(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def strange_zip_files() -> dict[str, bytes]:
    """Zip files that would take much memory or are damaged."""
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_BZIP2) as archive, archive.open("model.toml", "w") as entry:
        for _ in range(64):
            entry.write(bytes(2**20))
    flipped = bytearray(packed({"model.toml": b"a line that repeats\n" * 500}))
    flipped[50:70] = bytes(byte ^ 0x5A for byte in flipped[50:70])
    before = bytearray(packed({"model.toml": b"x = 1"}))
    place = before.rindex(b"PK\x05\x06") + 16  # where the directory begins, from which all other places are counted
    before[place : place + 4] = b"\xff\xff\xff\x7f"
    lies = bytearray(packed({"model.toml": bytes(2**23)}))
    place = lies.rindex(b"PK\x01\x02") + 24  # the size of the entry in the directory
    lies[place : place + 4] = (1000).to_bytes(4, "little")
    return {
        "unpacked in one piece": bomb.getvalue(),
        "a directory of 1.8 MB": packed({f"{number}{'x' * 60_000}": b"" for number in range(30)}),
        "flipped bits": bytes(flipped),
        "entries before the start": bytes(before),
        "too much": packed({"model.toml": bytes(2**20 + 1)}),
        "more than it says": bytes(lies),
    }


@pytest.mark.parametrize("kind", strange_zip_files())
def test_a_strange_zip_file_is_refused_without_much_memory(kind: str, tmp_path: Path) -> None:
    (tmp_path / "m.zip").write_bytes(strange_zip_files()[kind])
    tracemalloc.start()
    try:
        with pytest.raises(UserError):
            unpack_model(tmp_path / "m.zip", tmp_path / "model", 2**20)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()
    assert sum(path.stat().st_size for path in (tmp_path / "model").iterdir()) <= 2**20


def test_models_of_strangers(server: Server, emoji: dict[str, list[bytes]]) -> None:
    whole = server.call("GET", "/api/model/download").content
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    weights = next(name for name in files if name.startswith("weights-"))
    elsewhere = files["model.toml"].replace(b'backbone = "mini"', b'backbone = "/etc"')
    attacks = {
        "a path": files | {"../../evil.toml": b"x"},
        "other weights": files | {weights: files[weights][:-8] + b"12345678"},
        "no weights": {"model.toml": files["model.toml"]},
        "weights elsewhere": files | {"model.toml": files["model.toml"].replace(weights.encode(), b"../../x")},
        "nonsense": files | {"model.toml": b"\xff\x00"},
        "another backbone": files | {"model.toml": elsewhere.replace(b'fingerprint = "', b'fingerprint = "x')},
    }
    for name, content in attacks.items():
        answer = server.call("POST", "/api/model/upload", packed(content), "application/zip")
        assert answer.status_code == 400 and "\n" not in answer.json()["error"], (name, answer.text)
        assert "/serve/" not in answer.json()["error"], "where an upload is unpacked means nothing to the person"
    assert server.classes == ["fox", "owl"]
    # A model never chooses the backbone that is loaded: this one names a folder, and the server's own is taken.
    answer = server.call("POST", "/api/model/upload", packed(files | {"model.toml": elsewhere}), "application/zip")
    assert answer.status_code == 200
    assert server.predict(emoji["fox"][0])["classes"][0]["name"] == "fox"

"""What strangers and careless programs may try: each is refused in one line, and the model is as it was."""

from __future__ import annotations

import http.client
import io
import re
import socket
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from clipcil.errors import UserError
from clipcil.serve.guard import Guard, Limits, is_loopback
from clipcil.serve.transfer import unpack_model
from support.server import Server, form, png, running

SMALL = {
    "picture_bytes": 60_000,
    "request_bytes": 400_000,
    "request_pictures": 6,
    "pixels": 1_000_000,
    "queued_pictures": 4,
    "waiting_pictures": 8,
    "waiting_classes": 3,
    "model_bytes": 30_000_000,
    "listeners": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacked")


@pytest.fixture(scope="module")
def server(folder: Path, emoji: dict[str, list[bytes]]) -> Iterator[Server]:
    """A taught model on every address of this machine, so with a token, and with small limits."""
    with running(folder / "model", folder / "cache", host="0.0.0.0", method="simplecil", **SMALL) as found:
        token = found.address.split("token=")[1]
        found.headers["Authorization"] = f"Bearer {token}"
        assert found.teach({"fox": emoji["fox"][:2], "owl": emoji["owl"][:2]})["state"] == "done"
        yield found


def get(server: Server, path: str = "/api/health", **headers: str) -> int:
    return server.raw(
        "GET", path, None, {**server.headers, **{k.replace("_", "-"): v for k, v in headers.items()}}
    ).status


def test_a_foreign_host_is_refused(server: Server) -> None:
    """DNS rebinding: the page of evil.example, whose name now points here, sends its own name."""
    for host in (f"evil.example:{server.port}", "127.0.0.1.evil.example", "", "[::1", "evil@127.0.0.1"):
        assert get(server, Host=host) == 403, host
    for host in (f"127.0.0.1:{server.port}", "localhost:8000", f"[::1]:{server.port}", f"192.168.7.7:{server.port}"):
        assert get(server, Host=host) == 200, host


def test_on_loopback_only_loopback_names_count(folder: Path) -> None:
    async def nothing(*_: object) -> None: ...

    guard = Guard(nothing, "127.0.0.1", 7860, None, Limits())
    assert all(guard._is_own(name) for name in ("127.0.0.1:7860", "localhost", "[::1]:7860"))
    assert not any(guard._is_own(name) for name in ("192.168.7.7", "example.org", socket.gethostname() + ".x", ""))
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("::") and not is_loopback("example.org")


def test_a_foreign_origin_is_refused(server: Server) -> None:
    """Cross-site request forgery: a form or a script of another page."""
    own = f"127.0.0.1:{server.port}"
    for origin in ("http://evil.example", "null", f"http://localhost:{server.port}", f"http://{own}0", f"ftp://{own}"):
        assert get(server, Origin=origin, Host=own) == 403, origin
    assert get(server, Origin=f"http://{own}", Host=own) == 200
    assert get(server, Sec_Fetch_Site="cross-site") == 403
    assert get(server, Sec_Fetch_Site="same-site") == 403
    assert get(server, "/", Sec_Fetch_Site="cross-site") == 200, "a link to the page may be followed"


def test_without_the_token_nothing_is_answered(server: Server) -> None:
    token = server.headers["Authorization"].removeprefix("Bearer ")
    for path in ("/", "/docs", "/api/model", "/static/app.js", "/api/openapi.json", f"/?token={token[:-1]}"):
        answer = server.raw("GET", path, None, {})
        assert answer.status == 401 and "token" in answer.json["error"], path
    assert server.raw("GET", "/api/model", None, {"Authorization": f"Bearer {token}x"}).status == 401
    assert server.raw("GET", "/api/model", None, {"Authorization": f"Bearer \u00fc{token[1:]}"}).status == 401
    opened = server.raw("GET", f"/?token={token}", None, {})
    cookie = opened.headers["Set-Cookie"]
    assert (
        opened.status == 303
        and opened.headers["Location"] == "/"
        and "HttpOnly" in cookie
        and "SameSite=strict" in cookie
    )
    assert server.raw("GET", "/api/model", None, {"Cookie": cookie.split(";")[0]}).status == 200
    assert server.raw("GET", f"/api/model?token={token}", None, {}).status == 401, (
        "only the page takes it in the address"
    )


def test_too_large_uploads(server: Server, emoji: dict[str, list[bytes]]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest("POST", "/api/predict")
    for name, value in {**server.headers, "Content-Type": "image/png", "Content-Length": str(10**12)}.items():
        connection.putheader(name, value)
    connection.endheaders()  # refused before a byte of it is sent
    assert connection.getresponse().status == 413
    connection.close()
    endless = (b"x" * 50_000 for _ in range(50))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(
            "POST", "/api/predict", endless, {**server.headers, "Transfer-Encoding": "chunked"}, encode_chunked=True
        )
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # hung up in the middle, which is as good
    connection.close()
    assert server.call("PATCH", "/api/settings", b" " * 100_000, "application/json").status == 413
    large = png(Image.effect_noise((300, 300), 90))
    assert len(large) > SMALL["picture_bytes"]
    assert "MB" in server.add("fox", [("x.png", large)]).json["pictures"][0]["broken"]
    assert "MB" in server.predict(large)["error"]
    answer = server.add("fox", [(f"{i}.png", b"x") for i in range(7)])
    assert answer.status == 400 and "files" in answer.json["error"].lower()
    assert server.predict(emoji["fox"][0])["classes"][0]["name"] == "fox"


def test_pictures_of_too_many_pixels(server: Server) -> None:
    bomb = png(Image.new("1", (4_000, 4_000)))
    assert len(bomb) < 10_000
    assert "4000×4000 pixels are too many" in server.predict(bomb)["error"]
    found = server.add("fox", [("bomb.png", bomb)]).json["pictures"][0]
    assert "4000×4000 pixels are too many" in found["broken"]
    server.call("DELETE", "/api/waiting", name="fox")


def test_names_are_text_and_never_paths(server: Server, folder: Path, emoji: dict[str, list[bytes]]) -> None:
    before = {path for path in folder.rglob("*") if "cache" not in path.parts}
    evil = "../../evil/<b>x</b>"
    answer = server.add(evil, [("../../../up.png", emoji["rocket"][0]), ("C:\\\\boot\\\\x.png", emoji["rocket"][1])])
    assert answer.status == 201 and answer.json["name"] == evil
    assert [each["title"] for each in answer.json["pictures"]] == ["up.png", "x.png"]
    staged = [path.name for path in (folder / "cache" / "serve").rglob("*") if path.is_file() and path.name != ".lock"]
    assert len(staged) == 4 and all(re.fullmatch(r"[0-9a-f]{24}\.(picture|jpg)", name) for name in staged)
    assert {path for path in folder.rglob("*") if "cache" not in path.parts} == before
    for id in ("../../model/model.toml", "..", "%2e%2e", f"{answer.json['pictures'][0]['id']}/../x"):
        assert server.call("GET", "/api/waiting/thumbnail", id=id).status == 404
        assert server.call("DELETE", "/api/waiting", id=id).status == 404
    for path in ("/static/../api.py", "/static/%2e%2e/api.py", "/static//etc/passwd", "/static/..%2fapi.py"):
        assert server.call("GET", path).status == 404, path
    assert server.call("POST", "/api/lesson").status == 202 and server.wait_for_lesson()["state"] == "done"
    assert evil in server.classes
    names = {path.name for path in (folder / "model").iterdir()}
    assert all(
        re.fullmatch(r"model\.toml|previous\.toml|README\.md|\.lock|weights-[0-9a-f]{12}\.safetensors", n)
        for n in names
    )
    answer = server.call("GET", "/api/model")
    assert (
        answer.headers["Content-Type"] == "application/json" and answer.headers["X-Content-Type-Options"] == "nosniff"
    )
    assert server.call("DELETE", "/api/classes", name=evil).status == 200


def test_the_page_may_load_from_nowhere_else(server: Server) -> None:
    policy = server.call("GET", "/").headers["Content-Security-Policy"]
    assert policy.startswith(
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'"
    )
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy


def test_two_origins_are_refused(server: Server) -> None:
    own = f"127.0.0.1:{server.port}"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = {"Host": own, **server.headers, "Origin": f"http://{own}", "origin": "http://evil.example"}
        lines = ["GET /api/health HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
        client.sendall("\r\n".join(lines).encode())
        assert client.recv(100).startswith(b"HTTP/1.1 403")


def test_a_full_queue_says_when_to_come_again(server: Server, emoji: dict[str, list[bytes]]) -> None:
    body, kind = form("", [("x.png", emoji["fox"][0])] * 5)
    answer = server.call("POST", "/api/predict", body, kind)
    assert answer.status == 503 and int(answer.headers["Retry-After"]) >= 1
    body, kind = form("", [("x.png", emoji["fox"][0])] * 4)
    assert server.call("POST", "/api/predict", body, kind).status == 200


def test_what_waits_is_bounded(server: Server, emoji: dict[str, list[bytes]]) -> None:
    different = [(f"{i}", png(Image.new("RGB", (8, 8), (i, 0, 0)))) for i in range(9)]
    assert server.add("a", different[:6]).status == 201
    assert server.add("b", different[6:8]).status == 201
    answer = server.add("c", different[8:])
    assert answer.status == 400 and "teach them first" in answer.json["error"]
    for name in "ab":
        server.call("DELETE", "/api/waiting", name=name)
    for name in "abc":
        assert server.add(name, different[:1]).status == 201
    assert server.add("d", different[:1]).status == 400
    for name in "abc":
        server.call("DELETE", "/api/waiting", name=name)


def test_listeners_are_bounded(server: Server) -> None:
    open_ones = []
    for _ in range(2):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("GET", "/api/events", headers=server.headers)
        answer = connection.getresponse()
        assert answer.status == 200 and answer.readline()
        open_ones.append(connection)
    answer = server.call("GET", "/api/events")
    assert answer.status == 503 and answer.headers["Retry-After"]
    for connection in open_ones:
        connection.close()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PATCH", "/api/classes?name=fox", b"[1]"),
        ("PATCH", "/api/classes?name=fox", b"[" * 50_000),
        ("PATCH", "/api/classes?name=fox", b'{"name": ""}'),
        ("PATCH", "/api/classes?name=fox", b'{"name": ["x"]}'),
        ("PATCH", "/api/classes?name=fox", b'{"name": "' + b"x" * 301 + b'"}'),
        ("PATCH", "/api/classes?name=fox", b'{"name": "\\ud800"}'),
        ("PATCH", "/api/classes", b'{"name": "x"}'),
        ("PATCH", "/api/settings", b'{"keep_small_pictures": "yes"}'),
        ("POST", "/api/predict?top=0", b"x"),
        ("POST", "/api/predict?top=1e9", b"x"),
        ("DELETE", "/api/classes?name=nobody", b""),
        ("GET", "/api/export?format=pickle", b""),
        ("POST", "/api/model/upload", b"no zip"),
        ("POST", "/api/model/upload", b""),
    ],
)
def test_nonsense_gets_one_line(server: Server, method: str, path: str, body: bytes) -> None:
    answer = server.call(method, path, body)
    assert answer.status == 400 and "\n" not in answer.json["error"] and len(answer.json["error"]) < 400
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
    return {
        "unpacked in one piece": bomb.getvalue(),
        "a directory of 1.8 MB": packed({f"{number}{'x' * 60_000}": b"" for number in range(30)}),
        "flipped bits": bytes(flipped),
        "entries before the start": bytes(before),
        "an entry without a name": packed({"model.toml": b"x = 1", "z": b""}).replace(b"z", b"\0"),
        "too much": packed({"model.toml": bytes(2**20 + 1)}),
    }


@pytest.mark.parametrize("kind", strange_zip_files())
def test_a_strange_zip_file_is_refused_without_much_memory(kind: str, tmp_path: Path) -> None:
    (tmp_path / "m.zip").write_bytes(strange_zip_files()[kind])
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="zip file"):
            unpack_model(tmp_path / "m.zip", tmp_path / "model", 2**20)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_models_of_strangers(server: Server, emoji: dict[str, list[bytes]]) -> None:
    whole = server.call("GET", "/api/model/download").body
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
        assert answer.status == 400 and "\n" not in answer.json["error"], (name, answer.body)
        assert "/serve/" not in answer.json["error"], "where an upload is unpacked means nothing to the person"
    assert server.classes == ["fox", "owl"]
    # A model never chooses the backbone that is loaded: this one names a folder, and the server's own is taken.
    assert (
        server.call("POST", "/api/model/upload", packed(files | {"model.toml": elsewhere}), "application/zip").status
        == 200
    )
    assert server.predict(emoji["fox"][0])["classes"][0]["name"] == "fox"


def test_a_client_that_stops_in_the_middle_is_forgotten(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = {"Host": "localhost", **server.headers, "Content-Length": "1000"}
        lines = ["POST /api/predict HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", "abc"]
        client.sendall("\r\n".join(lines).encode())
    assert get(server) == 200

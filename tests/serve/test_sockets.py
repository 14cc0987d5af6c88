"""Raw sockets: connections that send nothing, requests that never end, and headers that contradict each other."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.server import Server, running

CONNECTIONS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sockets")


@pytest.fixture(scope="module")
def server(folder: Path, emoji: dict[str, list[bytes]]) -> Iterator[Server]:
    """A taught model on loopback, with short deadlines."""
    seconds = {"head_seconds": 2, "body_seconds": 1}
    with running(folder / "model", folder / "cache", method="simplecil", connections=CONNECTIONS, **seconds) as found:
        assert found.teach({"fox": emoji["fox"][:2], "owl": emoji["owl"][:2]})["state"] == "done"
        yield found


def send(server: Server, *lines: str) -> socket.socket:
    """A connection on which lines are sent; the end of the last one is missing."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    client.sendall("\r\n".join(lines).encode())
    return client


def read(client: socket.socket) -> bytes:
    """Everything that is sent until the server closes the connection."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


POST = ("POST /api/predict HTTP/1.1", "Host: localhost")
CLAIM = ("Content-Type: image/png", "Content-Length: 268000000")


@pytest.mark.parametrize(
    ("lines", "start"),
    [
        ((), b""),
        ((*POST, "Content-Type: ima"), b""),
        ((*POST, *CLAIM, "", "x"), b""),
        ((*POST, "Content-Length: 9000000000", "", "x"), b"HTTP/1.1 413 "),
        (("GET /api/health HTTP/1.1", "Host: localhost", "", "GET"), b"HTTP/1.1 200 "),
    ],
    ids=["nothing", "half a head", "half a body", "the rest of a refused body", "half of another head"],
)
def test_what_never_ends_is_closed(server: Server, lines: tuple[str, ...], start: bytes) -> None:
    with send(server, *lines) as client:
        found = read(client)
    assert found.startswith(start) and found.count(b"HTTP/1.1") == bool(start)


def test_uploads_that_claim_much_and_send_little_keep_nobody_waiting(
    server: Server, emoji: dict[str, list[bytes]]
) -> None:
    with ExitStack() as stack:
        for _ in range(CONNECTIONS - 2):
            stack.enter_context(send(server, *POST, *CLAIM, "", "x"))
        assert server.predict(emoji["fox"][0])["name"] == "fox"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (("Host: localhost", "Content-Length: 3", "Transfer-Encoding: chunked"), 400),
        (("Host: localhost", "Transfer-Encoding: chunked", "Content-Length: 3"), 400),
        (("Host: localhost", "Transfer-Encoding: chunked"), 411),
        (("Host: localhost", "Host: evil.example", "Content-Length: 0"), 400),
        (("Host: evil@127.0.0.1", "Content-Length: 0"), 403),
        (("Host: 127.0.0.1/evil", "Content-Length: 0"), 403),
        (("Host: localhost", "Origin: http://localhost", "Origin: http://evil.example", "Content-Length: 0"), 403),
    ],
)
def test_headers_that_contradict_each_other(server: Server, headers: tuple[str, ...], status: int) -> None:
    with send(server, "POST /api/undo HTTP/1.1", *headers, "Connection: close", "", "0", "", "") as client:
        assert read(client).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    ("headers", "start"),
    [
        ((*POST, "Transfer-Encoding: chunked", "", "no size", ""), b"HTTP/1.1 400 "),
        ((*POST, "Content-Length: 1", "", "xno request", "", ""), b"HTTP/1.1 200 "),
        (("no request", "", ""), b"HTTP/1.1 400 "),
        ((*POST, "Content-Type: multipart/form-data; boundary=x", "Content-Length: 3", "", "--y"), b"HTTP/1.1 400 "),
    ],
)
def test_what_is_not_http_prints_nothing(server: Server, headers: tuple[str, ...], start: bytes) -> None:
    """The application may have answered, or be about to; `running` sees that nothing is printed."""
    with send(server, *headers) as client:
        assert read(client).startswith(start)
    with send(server, *POST, "Transfer-Encoding: chunked", "", "") as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 411 ")
        client.sendall(b"no size\r\n")
        read(client)


def test_idle_connections_are_closed_where_others_come(server: Server, emoji: dict[str, list[bytes]]) -> None:
    with ExitStack() as stack:
        for _ in range(5 * CONNECTIONS):
            stack.enter_context(send(server))
        assert server.predict(emoji["fox"][0])["name"] == "fox"
    assert server.process.stderr is not None
    assert f"{CONNECTIONS} connections" in server.process.stderr.readline(), "`running` sees that no other line follows"

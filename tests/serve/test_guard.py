"""What the guard refuses before it reaches the application: requests of other sites, without the token, too large."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from clipcil.serve.answers import Limits
from clipcil.serve.server import Guard

OWN = "127.0.0.1:7860"
COOKIE = ("Cookie", "clipcil-7860=secret")
SMALL = Limits(request_bytes=400, small_bytes=100, all_bytes=1000)
inner: ASGIApp = PlainTextResponse("in")


def ask(path: str, *headers: tuple[str, Any], token: str | None = None, **how: Any) -> httpx.Response:
    return asyncio.run(ask_guard(Guard(inner, 7860, token, SMALL), path, *headers, **how))


async def ask_guard(
    guard: Guard, path: str, *headers: tuple[str, Any], method: str = "GET", host: str = OWN, **how: Any
) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url=f"http://{OWN}") as client:
        return await client.request(method, path, headers=[("Host", host), *headers], **how)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in (OWN, "localhost", "LOCALHOST:8000", "[::1]:7860", "127.0.0.2")),
        *((host, 403) for host in ("evil.example:7860", "127.0.0.1.evil.example", "localhost.evil.example")),
        *((host, 403) for host in ("", "[::1", "192.168.7.7", "0.0.0.0", "[::]", "evil@localhost", "localhost/evil")),
    ],
)
def test_only_names_of_loopback_are_hosts(host: str, status: int) -> None:
    """DNS rebinding: the page of evil.example, whose name now points here, sends its own name."""
    assert ask("/api/health", host=host).status_code == status
    assert ask("/api/health", host=host, token="secret").status_code == 401, "elsewhere the token decides"


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:7860", f"http://{OWN}0", f"ftp://{OWN}"]
)
@pytest.mark.parametrize("token", [None, "secret"])
def test_a_foreign_origin_is_refused(origin: str, token: str | None) -> None:
    """Cross-site request forgery: a form or a script of another page. The browser sends the cookie along."""
    own = ("Origin", f"http://{OWN}")
    assert ask("/api/health", COOKIE, own, token=token).status_code == 200
    assert ask("/api/health", COOKIE, ("Origin", origin), token=token).status_code == 403
    assert ask("/api/health", COOKIE, own, ("Origin", origin), token=token).status_code == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_site_may_only_link_to_the_page(site: str) -> None:
    from_there = ("Sec-Fetch-Site", site)
    assert ask("/api/health", from_there).status_code == 403
    assert ask("/", from_there).status_code == 200
    assert ask("/", from_there, method="POST").status_code == 403


def test_without_the_token_nothing_is_answered() -> None:
    for path in ("/", "/docs", "/api/model", "/static/app.js", "/api/openapi.json", "/?token=secre"):
        answer = ask(path, token="secret")
        assert answer.status_code == 401 and "token" in answer.json()["error"], path
    for bearer, status in (("secret", 200), ("secretx", 401), ("\u00fcsecret", 401)):
        header = ("Authorization", f"Bearer {bearer}".encode("latin-1"))
        assert ask("/api/model", header, token="secret").status_code == status
    opened = ask("/?token=secret", token="secret")
    cookie = opened.headers["Set-Cookie"]
    assert opened.status_code == 303 and opened.headers["Location"] == "/"
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert ask("/api/model", ("Cookie", cookie.split(";")[0]), token="secret").status_code == 200
    assert ask("/api/model?token=secret", token="secret").status_code == 401, "only the page takes it in the address"


def test_the_token_on_another_host() -> None:
    """The server is reached by any name; the cookie of another port or a page of another name does not count."""
    for host in ("192.168.7.7:7860", "lab.example:7860"):
        assert ask("/api/model", COOKIE, ("Origin", f"http://{host}"), host=host, token="secret").status_code == 200
        assert ask("/api/model", COOKIE, ("Origin", f"http://{OWN}"), host=host, token="secret").status_code == 403
        other = ("Cookie", COOKIE[1].replace("7860", "7861"))
        assert ask("/api/model", other, host=host, token="secret").status_code == 401
        assert ask("/?token=secret", host=host, token="secret").headers["Location"] == "/"
        assert ask("/?token=other", host=host, token="secret").status_code == 401


def test_a_body_has_a_size_and_a_limit() -> None:
    assert ask("/api/predict", method="POST", content=b"x" * 400).status_code == 200
    assert ask("/api/predict", method="POST", content=b"x" * 401).status_code == 413
    assert ask("/api/settings", method="PATCH", content=b"x" * 101).status_code == 413

    async def endless() -> Any:
        yield b"x"

    assert ask("/api/predict", method="POST", content=endless()).status_code == 411


def test_all_bodies_together_have_a_limit() -> None:
    async def one_after_three() -> list[int]:
        going = asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            try:
                await receive()
            except HTTPException as error:
                await PlainTextResponse("", error.status_code)(scope, receive, send)
            else:
                await going.wait()
                await inner(scope, receive, send)

        guard = Guard(slow, 7860, None, SMALL)
        upload = {"method": "POST", "content": b"x" * 400}
        tasks = [asyncio.create_task(ask_guard(guard, "/api/predict", **upload)) for _ in range(3)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        going.set()
        answers = [await task for task in tasks] + [await ask_guard(guard, "/api/predict", **upload)]
        return [answer.status_code for answer in answers]

    assert asyncio.run(one_after_three()) == [200, 200, 503, 200]


def test_every_answer_forbids_other_sources() -> None:
    for answer in (ask("/"), ask("/", host="evil.example")):
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:;")
        assert "unsafe" not in policy and "http" not in policy and "*" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert ask("/api/health").headers["Cache-Control"] == "no-store"

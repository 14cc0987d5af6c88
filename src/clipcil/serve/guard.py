"""Checks of every request before it reaches the API: authentication, origin and size.

- The Host must be an address or a name of this machine: a page of another site whose name was made to point here (DNS
  rebinding) sends its own name.
- The Origin, where there is one, must be this server, and `Sec-Fetch-Site` must not say that another site asks: a form
  or script of another site (cross-site request forgery) is refused.
- On another address than loopback every request needs the token, in a cookie or as `Authorization: Bearer`.
- A body is counted while it arrives, and all bodies together have a budget.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clipcil.serve.limits import Limits

SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script';"
        " trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
}
SMALL_BODY = 64 * 2**10
"""Bytes of a request that carries no file."""
SILENCE_SECONDS = 30.0
"""A client that sends nothing for this long in the middle of its request is cut off."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """Middleware around the whole application."""

    def __init__(self, app: ASGIApp, host: str, port: int, token: str | None, limits: Limits) -> None:
        self.app, self.token, self.limits = app, token, limits
        self.names = {"localhost", host.lower().strip("[]")} | (
            set() if token is None else {socket.gethostname().lower()}
        )
        self.loopback_only = token is None
        self.cookie = f"clipcil-{port}"  # cookies of all ports of a host share one jar
        self._buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                for name, value in SECURITY.items():
                    found[name] = value
                found.setdefault("Cache-Control", "no-store" if scope["path"].startswith("/api/") else "no-cache")
            await send(message)

        answer = self._refuse_stranger(scope, headers) or self._refuse_unknown(scope, headers)
        if answer is not None:
            await answer(scope, receive, send_safely)
            return
        await self._pass(scope, headers, receive, send_safely)

    def _refuse_stranger(self, scope: Scope, headers: Headers) -> Response | None:
        """The refusal of a request that comes from another site's page; None for any other request."""
        host = headers.get("host", "")
        if not self._own_name(host):
            return _error(403, f"this server is not called '{_shown(host)}'; open it by its address")
        origin = headers.get("origin")
        if origin is not None and not _of_page(origin, host):
            return _error(403, f"requests from the page of '{_shown(origin)}' are refused")
        site = headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin") and (scope["path"] not in ("/", "/docs") or scope["method"] != "GET"):
            return _error(403, "requests from another site's page are refused")
        return None

    def _own_name(self, host: str) -> bool:
        """Whether the Host is a name of this machine or a literal address; another name could be made to point here."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self.names:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback or not self.loopback_only
        except ValueError:
            return False

    def _refuse_unknown(self, scope: Scope, headers: Headers) -> Response | None:
        """The answer to a request without a cookie: a cookie if its address has the token, else 401; None: let it
        pass."""
        if self.token is None:
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and self._is_token(given):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
            return answer
        bearer = headers.get("authorization", "").removeprefix("Bearer ").strip()
        if self._is_token(bearer) or self._is_token(cookie_parser(headers.get("cookie", "")).get(self.cookie, "")):
            return None
        return _error(401, "this server needs its token; open the address that clipcil printed when it started")

    def _is_token(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Hand the request on with its body counted."""
        most = self._most_bytes(scope["path"])
        length = headers.get("content-length")
        has_body = length is not None or "transfer-encoding" in headers
        expected = int(length) if length is not None and length.isdecimal() else most if has_body else 0
        if expected > most:
            await _error(413, f"a request of {expected} bytes is too large; at most {most} are taken here")(
                scope, receive, send
            )
            return
        if self._buffered + expected > self.limits.buffered_bytes:
            await _busy("too many uploads at once; try again in a moment")(scope, receive, send)
            return
        read, more = 0, expected > 0

        async def receive_counted() -> Message:
            nonlocal read, more
            try:
                message = await (asyncio.wait_for(receive(), SILENCE_SECONDS) if more else receive())
            except TimeoutError:
                raise HTTPException(408, "the request stopped in the middle") from None
            read, more = read + len(message.get("body", b"")), message.get("more_body", False)
            if read > most:
                raise HTTPException(413, f"the request is too large; at most {most} bytes are taken here")
            return message

        self._buffered += expected
        try:
            await self.app(scope, receive_counted, send)
        finally:
            self._buffered -= expected

    def _most_bytes(self, path: str) -> int:
        if path in ("/api/predict", "/api/waiting"):
            return self.limits.request_bytes
        return self.limits.model_bytes if path == "/api/model/upload" else SMALL_BODY


def _shown(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:60])


def _error(status: int, line: str) -> JSONResponse:
    return JSONResponse({"error": line}, status)


def _busy(line: str) -> JSONResponse:
    return JSONResponse({"error": line}, 503, {"Retry-After": "1"})


def _of_page(origin: str, host: str) -> bool:
    """Whether a request's Origin is a page of this server."""
    try:
        found = urlsplit(origin)
    except ValueError:
        return False
    return found.scheme in ("http", "https") and found.netloc == host

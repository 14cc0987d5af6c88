"""Limits of a server, and the checks of every request before it reaches the API: host, origin, token and size.

- The Host must be an address or a name of this machine. A page of another site whose name points to this machine (DNS
  rebinding) sends its own name.
- The Origin, if there is one, must be this server, and `Sec-Fetch-Site` must not name another site: forms and scripts
  of other sites (cross-site request forgery) are refused.
- On any address other than loopback every request needs the token, in a cookie or as `Authorization: Bearer`.
- A body is counted as it arrives. Each body has a limit, and all bodies together have another.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import parse_qs

from fastapi import HTTPException
from fastapi.responses import JSONResponse, RedirectResponse, Response
from PIL import Image
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clipcil.data.pictures import readable_formats

MB = 2**20
HEADERS = {
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
"""Headers of every answer."""


@dataclass(frozen=True)
class Limits:
    """Every bound of a server: what one request, all requests and all waiting pictures may take."""

    picture_bytes: int = 32 * MB
    """Bytes of one picture file."""
    pixels: int = 50_000_000
    """Pixels of one picture."""
    request_bytes: int = 256 * MB
    """Bytes of a request with pictures."""
    request_pictures: int = 64
    """Pictures in one request."""
    model_bytes: int = 1024 * MB
    """Bytes of an uploaded model, packed and unpacked."""
    small_bytes: int = 64 * 2**10
    """Bytes of any other request."""
    buffered_bytes: int = 1280 * MB
    """Bytes of all requests in progress together; beyond it the answer is 503."""
    silent_seconds: float = 30.0
    """Seconds without a byte in the middle of a request after which the client is cut off."""
    queued_pictures: int = 256
    """Pictures that wait for a prediction; beyond it the answer is 503."""
    batch: int = 32
    """Pictures predicted in one pass."""
    top: int = 100
    """Classes named for one picture."""
    waiting_pictures: int = 20_000
    """Pictures that wait to be taught."""
    waiting_bytes: int = 4096 * MB
    """Bytes on disk of the pictures that wait to be taught."""
    waiting_classes: int = 1000
    """Classes with pictures that wait to be taught."""
    listeners: int = 32
    """Pages that listen for events at the same time."""

    def body(self, path: str) -> int:
        """Maximum bytes of a request to `path`."""
        if path in ("/api/predict", "/api/waiting"):
            return self.request_bytes
        return self.model_bytes if path == "/api/model/upload" else self.small_bytes

    def refusal(self, picture: bytes) -> str | None:
        """Why a picture file is refused before it is decoded: too many bytes or pixels. None: it is not."""
        if len(picture) > self.picture_bytes:
            return f"more than {self.picture_bytes // MB} MB; make it smaller"
        try:
            with Image.open(io.BytesIO(picture), formats=readable_formats()) as image:
                width, height = image.size
        except Exception:  # a damaged header can raise anything; decoding reports it
            return None
        if width * height <= self.pixels:
            return None
        return f"{width}×{height} pixels are too many; at most {self.pixels // 10**6} million are allowed"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """Middleware around the whole application, which listens on `host` and `port`. On loopback `token` is None."""

    def __init__(self, app: ASGIApp, host: str, port: int, token: str | None, limits: Limits) -> None:
        self.app, self.token, self.limits = app, token, limits
        self.names = {"localhost", host.lower().strip("[]")}
        if token is not None:
            self.names.add(socket.gethostname().lower())
        self.cookie = f"clipcil-{port}"  # cookies of all ports of a host share one jar
        self._buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                found.update(HEADERS)
                found.setdefault("Cache-Control", "no-store" if scope["path"].startswith("/api/") else "no-cache")
            await send(message)

        answer = self._refuse_site(scope, headers) or self._refuse_token(scope, headers)
        if answer is not None:
            await answer(scope, receive, send_safely)
        else:
            await self._pass(scope, headers, receive, send_safely)

    def _refuse_site(self, scope: Scope, headers: Headers) -> Response | None:
        """The refusal of a request that the page of another site sends; None for any other request."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            return _error(403, f"unexpected Host header '{_shown(hosts)}'; open the server by its address")
        origins = headers.getlist("origin")
        if not all(origin in (f"http://{hosts[0]}", f"https://{hosts[0]}") for origin in origins):
            return _error(403, f"requests from the page of '{_shown(origins)}' are refused")
        site = headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin") and (scope["path"] not in ("/", "/docs") or scope["method"] != "GET"):
            return _error(403, "requests from another site's page are refused")
        return None

    def _is_own(self, host: str) -> bool:
        """Whether a Host is a name of this machine or a literal address. Other names could point here, too."""
        found = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:@/?#\\\s]+))(?::\d*)?", host.lower())
        name = found and (found[1] or found[2])
        if not name or name in self.names:
            return bool(name)
        try:
            return ipaddress.ip_address(name).is_loopback or self.token is not None
        except ValueError:
            return False

    def _refuse_token(self, scope: Scope, headers: Headers) -> Response | None:
        """The answer to a request without the cookie: the cookie if the address has the token, else 401."""
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
        """Hand the request to the application and count its body."""
        most, length = self.limits.body(scope["path"]), headers.get("content-length", "0")
        too_large = HTTPException(413, f"the request is too large; at most {most} bytes are allowed here")
        if length.isdecimal() and int(length) > most:
            await _error(413, too_large.detail)(scope, receive, send)
            return
        read, more = 0, length != "0" or "transfer-encoding" in headers

        async def receive_counted() -> Message:
            nonlocal read, more
            try:
                message = await asyncio.wait_for(receive(), self.limits.silent_seconds if more else None)
            except TimeoutError:
                raise HTTPException(408, "the request stopped in the middle") from None
            size, more = len(message.get("body", b"")), message.get("more_body", False)
            read += size
            self._buffered += size
            if read > most:
                raise too_large
            if self._buffered > self.limits.buffered_bytes:
                raise HTTPException(503, "too many uploads at once; try again in a moment", {"Retry-After": "1"})
            return message

        try:
            await self.app(scope, receive_counted, send)
        finally:
            self._buffered -= read


def _shown(values: list[str]) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in ", ".join(values)[:60])


def _error(status: int, line: str) -> JSONResponse:
    return JSONResponse({"error": line}, status)

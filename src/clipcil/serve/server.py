"""`clipcil serve`: the application behind its guard, and a server that runs until it is stopped."""

import asyncio
import hmac
import ipaddress
import logging
import re
import resource
import secrets
import socket
import sys
import threading
import webbrowser
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import h11
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

import clipcil
from clipcil.classifier.folder import hold_model
from clipcil.errors import UserError, printable
from clipcil.serve.answers import Error, Limits, explain, is_full
from clipcil.serve.api import Service, router
from clipcil.serve.model import ServedModel
from clipcil.serve.staging import open_staging
from clipcil.training.cpu import share_freed_memory

STATIC = Path(__file__).parent / "static"
ABOUT = 'Teach a model classes of pictures and ask it what pictures show. Errors are JSON: {"error": "one line"}.'
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


def serve_model(
    folder: Path,
    host: str,
    port: int,
    open_page: bool,
    method: str | None,
    backbone: str | None,
    device: str,
    limits: Limits | None = None,
) -> None:
    """Serve the model in `folder`, which stays locked, until the process is stopped."""
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # else each wrong form is a line in the terminal
    share_freed_memory()
    limits = limits or Limits()
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 < descriptors < 4 * limits.connections:  # the rest is for files, and for connections not yet refused
        limits = replace(limits, connections=descriptors // 4)
    with _listen(host, port) as listening, hold_model(folder), open_staging(folder, limits) as staging:
        port = listening.getsockname()[1]
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
        page = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
        token = None if is_loopback(host) else secrets.token_urlsafe(24)
        service = Service(ServedModel(folder, method, backbone, device, staging), staging, limits)
        config = uvicorn.Config(
            build_app(service, port, token),
            http=partial(Connection, limits=limits, waiting={}),  # type: ignore[arg-type]  # it is only called
            log_level="error",
            server_header=False,
            lifespan="off",
            ws="none",
            limit_concurrency=limits.connections,
            timeout_keep_alive=2 * limits.head_seconds,  # never reached, because `Connection` closes before
            backlog=32,  # at most so many are accepted at once
            timeout_graceful_shutdown=5,
        )
        server = uvicorn.Server(config)
        service.stopping = lambda: server.should_exit
        page += f"/?token={token}" if token else ""
        print(f"{printable(folder)} is served at {page} (Ctrl-C ends it)", flush=True)
        if token:
            print("whoever has this address with its token can teach and use the model", flush=True)
        if open_page:
            threading.Timer(0.5, webbrowser.open, [page]).start()
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:
            pass  # Ctrl-C is how it is ended
        finally:
            service.lessons.close()


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens before the address is printed: a reader may connect at once."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server((address[0], port, *address[2:]), family=family, dualstack_ipv6=both)
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen at {host} port {port} ({why}); choose other --host and --port") from error


def build_app(service: Service, port: int, token: str | None) -> ASGIApp:
    """The application behind its guard."""
    handlers: dict[int | type[Exception], Any] = {OSError: _explain_disk, Exception: _explain}
    for expected in (HTTPException, RequestValidationError, UserError, ClientDisconnect):
        handlers[expected] = _explain  # without this the terminal would report it
    failed = {"application/json": {"schema": Error.model_json_schema()}}  # also where the answer is a picture
    app = FastAPI(
        title="clipcil serve",
        version=clipcil.__version__,
        description=ABOUT,
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
        dependencies=[Depends(HTTPBearer(auto_error=False, description="The token; not needed on loopback"))],
        responses={"default": {"description": "Refused or failed, with the reason in one line", "content": failed}},
        exception_handlers=handlers,
    )
    app.state.service = service
    app.include_router(router)
    app.add_route("/", lambda request: FileResponse(STATIC / "index.html"), include_in_schema=False)
    app.add_route("/docs", lambda request: FileResponse(STATIC / "docs.html"), include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC))
    return Guard(app, port, token, service.limits)


async def _explain(request: Request, error: Exception) -> Response:
    return _error(*explain(error), getattr(error, "headers", None))


async def _explain_disk(request: Request, error: Exception) -> Response:
    if not is_full(error):
        raise error
    return await _explain(request, error)


def _error(status: int, line: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": line}, status, headers)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host.lower() == "localhost"


def _names_loopback(host: str) -> bool:
    """Whether a Host header, with or without a port, is a name of loopback."""
    found = re.fullmatch(r"(\[[\da-fA-F:.]+\]|[\w.-]+)(:\d+)?", host)
    return found is not None and is_loopback(found[1])


class Connection(H11Protocol):
    """A connection that is closed when a request takes too long to arrive, as uvicorn never does.

    - A head has `Limits.head_seconds` from the connection or the last answer on, and a body `Limits.body_seconds`. The
      rest of a refused body has the time of a head.
    - Where there are too many connections, the one that has waited longest without a request is closed, else the one
      that has waited longest for the rest of a request or for another.

    `waiting` holds the connections of a server whose requests are not complete, in the order in which they began to
    wait, each with its deadline.
    """

    def __init__(
        self, *args: Any, limits: Limits, waiting: "dict[Connection, asyncio.TimerHandle]", **others: Any
    ) -> None:
        super().__init__(*args, **others)
        self.limits, self.waiting = limits, waiting
        self.states: tuple[Any, ...] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) >= self.limits.connections and self.waiting:
            min(self.waiting, key=lambda each: each.cycle is not None)._give_up()
            _tell_crowd(self.limits.connections)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, if nothing was answered, and let the application answer no more."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def _watch(self) -> None:
        """Set another deadline where the state has changed."""
        states = self.conn.their_state, self.conn.our_state
        if states == self.states or self.transport.is_closing():
            return
        self.states = states
        self._stop_waiting()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            taken = self.conn.their_state is h11.SEND_BODY and not self.cycle.response_complete
            seconds = self.limits.body_seconds if taken else self.limits.head_seconds
            self.waiting[self] = self.loop.call_later(seconds, self._give_up)

    def _stop_waiting(self) -> None:
        if self in self.waiting:
            self.waiting.pop(self).cancel()

    def _give_up(self) -> None:
        self._stop_waiting()
        self.transport.abort()


@cache
def _tell_crowd(connections: int) -> None:
    """Say once that connections are closed because there are too many."""
    print(f"clipcil: {connections} connections are open; those that wait longest are closed", file=sys.stderr)


class Guard:
    """Middleware that refuses requests by their host, origin, token or size before they reach the application.

    - On loopback the Host must name loopback: a page of another site whose name points here (DNS rebinding) sends its
      own name. On any other address every request needs the token, in a cookie or as `Authorization: Bearer`.
    - Forms and scripts of other sites (cross-site request forgery) are known by Origin and `Sec-Fetch-Site`.
    - Every body says its size beforehand. Each has a limit, and the bytes of all bodies that have arrived another.
    """

    def __init__(self, app: ASGIApp, port: int, token: str | None, limits: Limits) -> None:
        self.app, self.token, self.limits = app, token, limits
        self.cookie = f"clipcil-{port}"  # cookies of all ports of a host share one jar
        self._bytes = 0  # of all requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        size = int(request.headers.get("content-length", 0))

        arrived = 0

        async def receive_counted() -> Message:
            nonlocal arrived
            message = await receive()
            count = len(message.get("body", b""))
            arrived += count
            self._bytes += count
            if self._bytes > self.limits.all_bytes:
                raise HTTPException(503, "too many uploads at once; try again in a moment", {"Retry-After": "1"})
            return message

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                found.update(HEADERS)
                found.setdefault("Cache-Control", "no-store" if scope["path"].startswith("/api/") else "no-cache")
            await send(message)

        refused = self._refusal(request, size)
        if refused is not None:
            await refused(scope, receive, send_safely)
            return
        try:
            await self.app(scope, receive_counted, send_safely)
        finally:
            self._bytes -= arrived

    def _refusal(self, request: Request, size: int) -> Response | None:
        headers, path, host = request.headers, request.scope["path"], request.headers.get("host", "")
        if self.token is None and not _names_loopback(host):
            return _error(403, "unexpected Host header; open the server by its address")
        if any(origin not in (f"http://{host}", f"https://{host}") for origin in headers.getlist("origin")):
            return _error(403, "requests from the page of another origin are refused")
        followed = path in ("/", "/docs") and request.method == "GET"  # a link to the page
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not followed:
            return _error(403, "requests from another site's page are refused")
        if path == "/" and self._is_token(request.query_params.get("token", "")):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self.cookie, self.token or "", httponly=True, samesite="strict", path="/")
            return answer
        bearer = headers.get("authorization", "").removeprefix("Bearer ").strip()
        if self.token is not None and not any(map(self._is_token, (bearer, request.cookies.get(self.cookie, "")))):
            return _error(401, "this server needs its token; open the address that clipcil printed when it started")
        if "transfer-encoding" in headers:
            status = 400 if "content-length" in headers else 411
            return _error(status, "send the size of the request in the header Content-Length, without another coding")
        if size > self.limits.body(path):
            return _error(413, f"the request is too large; at most {self.limits.body(path)} bytes are allowed here")
        return None

    def _is_token(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

"""`clipcil serve`: the application, and a server that runs until it is stopped."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import threading
import webbrowser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

import clipcil
from clipcil.classifier.model_folder import hold_model
from clipcil.errors import UserError, printable
from clipcil.serve.answers import Error
from clipcil.serve.api import Service, router
from clipcil.serve.guard import Guard, Limits, is_loopback
from clipcil.serve.model import Keeper
from clipcil.serve.staging import open_staging

STATIC = Path(__file__).parent / "static"
ABOUT = 'Teach a model classes of pictures and ask it what pictures show. Errors are JSON: {"error": "one line"}.'
EXPECTED = (HTTPException, RequestValidationError, UserError, ClientDisconnect)
"""Errors that the terminal does not report."""
NO_ADDRESS = "there is no such address, or it does not take this method; /docs lists what there is"


def build_app(service: Service, host: str, port: int, token: str | None) -> ASGIApp:
    """The application behind its guard."""

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        service.hub.open()
        batches = asyncio.create_task(service.predictor.run())
        yield
        batches.cancel()
        with suppress(asyncio.CancelledError):
            await batches

    handlers: dict[int | type[Exception], Any] = {OSError: _explain_disk, Exception: _explain}
    app = FastAPI(
        title="clipcil serve",
        version=clipcil.__version__,
        description=ABOUT,
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=running,
        generate_unique_id_function=lambda route: route.name,
        dependencies=[Depends(HTTPBearer(auto_error=False, description="The token, on other addresses than loopback"))],
        responses={"default": {"model": Error, "description": "Refused or failed, with the reason in one line"}},
        exception_handlers=handlers | dict.fromkeys(EXPECTED, _explain),
    )
    app.state.service = service
    app.include_router(router)
    for path, page in {"/": "index.html", "/docs": "docs.html"}.items():
        app.add_route(path, partial(_page, page), include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC))
    return Guard(app, host, port, token, service.limits)


async def _page(name: str, request: Request) -> Response:
    return FileResponse(STATIC / name)


async def _explain(request: Request, error: Exception) -> Response:
    """An error as JSON in one line."""
    status, headers = 400, None
    if isinstance(error, HTTPException):
        status, headers, line = error.status_code, error.headers, error.detail
        line = NO_ADDRESS if line in ("Not Found", "Method Not Allowed") else line
    elif isinstance(error, RequestValidationError):
        found = error.errors()[0]
        line = f"{' '.join(map(str, found['loc'][:2]))}: {found['msg']}"
    elif _is_full(error):
        status, line = 507, "the disk of the machine that runs clipcil is full; make room on it and try again"
    elif isinstance(error, UserError):
        line = printable(" ".join(str(error).split()))
    elif isinstance(error, ClientDisconnect):
        line = "the request stopped in the middle"  # nobody reads it
    else:
        status, line = 500, f"unexpected error ({type(error).__name__}); the terminal has the details"
    return JSONResponse({"error": line}, status, headers)


async def _explain_disk(request: Request, error: Exception) -> Response:
    if not _is_full(error):
        raise error
    return await _explain(request, error)


def _is_full(error: BaseException | None) -> bool:
    """Whether an error was caused by a full disk or an exceeded quota."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None and error.errno in (errno.ENOSPC, errno.EDQUOT)


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
    """Serve the model in `folder` until the process is stopped.

    The folder stays locked, so that no other process changes the model.

    Raises:
        UserError: The folder is in use or holds no model, or the address is not available.
    """
    limits = limits or Limits()
    with _listen(host, port) as listening:
        port = listening.getsockname()[1]
        address = _address(host, port)
        with hold_model(folder, f"clipcil serve at {address}"), open_staging(folder, limits) as staging:
            token = None if is_loopback(host) else secrets.token_urlsafe(24)
            service = Service(Keeper(folder, method, backbone, device), staging, limits)
            app = build_app(service, host, port, token)
            page = f"{address}/?token={token}" if token else address
            print(f"{printable(folder)} is served at {page} (Ctrl-C ends it)", flush=True)
            if token:
                line = "others can reach this server: anyone with the address and its token can teach and use the model"
                print(line, flush=True)
            if open_page:
                threading.Timer(0.5, webbrowser.open, [page]).start()
            try:
                with suppress(KeyboardInterrupt):  # Ctrl-C is how it is ended
                    _Server(app, service).run(sockets=[listening])
            finally:
                service.lessons.close()


class _Server(uvicorn.Server):
    """Ends event streams, which would never end, and refuses waiting pictures when it is asked to stop."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        super().__init__(
            uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=5)
        )
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.hub.close()
        self._service.predictor.closed = True
        super().handle_exit(sig, frame)


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:  # the system would take the lowest 16 bits of it
        raise UserError(f"there is no port {port}; choose one from 0 to 65535 with --port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)  # before the address is printed: a reader may connect at once
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot listen at {host} port {port} ({why}); choose another with --host and --port"
        ) from error
    return listening


def _address(host: str, port: int) -> str:
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"

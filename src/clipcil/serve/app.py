"""The application: routes, static files, errors."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from clipcil.errors import UserError, printable
from clipcil.serve.api import Api
from clipcil.serve.guard import Guard
from clipcil.serve.openapi import document

STATIC = Path(__file__).parent / "static"
FULL = "the disk of the machine that runs clipcil is full; make room on it and try again"
NO_ADDRESS = "there is no such address, or it does not take this method; /docs lists what there is"


def api_routes(api: Api) -> list[Route]:
    """Every address of the API."""
    return [
        Route("/api/health", api.health, methods=["GET"]),
        Route("/api/model", api.model, methods=["GET"]),
        Route("/api/predict", api.predict, methods=["POST"]),
        Route("/api/waiting", api.waiting, methods=["GET"]),
        Route("/api/waiting", api.add_waiting, methods=["POST"]),
        Route("/api/waiting", api.remove_waiting, methods=["DELETE"]),
        Route("/api/waiting/thumbnail", api.thumbnail, methods=["GET"]),
        Route("/api/lesson", api.lesson, methods=["GET"]),
        Route("/api/lesson", api.start_lesson, methods=["POST"]),
        Route("/api/lesson", api.cancel_lesson, methods=["DELETE"]),
        Route("/api/events", api.events, methods=["GET"]),
        Route("/api/classes", api.rename_class, methods=["PATCH"]),
        Route("/api/classes", api.forget_class, methods=["DELETE"]),
        Route("/api/classes/picture", api.small_picture, methods=["GET"]),
        Route("/api/undo", api.undo, methods=["POST"]),
        Route("/api/settings", api.settings, methods=["PATCH"]),
        Route("/api/export", api.export, methods=["GET"]),
        Route("/api/model/download", api.download, methods=["GET"]),
        Route("/api/model/upload", api.upload, methods=["POST"]),
    ]


def build_app(api: Api, host: str, port: int, token: str | None) -> ASGIApp:
    """The application behind its guard."""
    routes = api_routes(api)
    described = document(routes)

    async def openapi(request: Request) -> Response:
        return JSONResponse(described)

    def page(name: str) -> Route:
        async def show(request: Request) -> Response:
            return FileResponse(STATIC / name, media_type="text/html")

        return Route("/" if name == "index.html" else "/docs", show, methods=["GET"])

    @asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[None]:
        api.hub.open()
        batches = asyncio.create_task(api.predictor.run())
        yield
        batches.cancel()
        with suppress(asyncio.CancelledError):
            await batches

    app = Starlette(
        routes=[
            *routes,
            Route("/api/openapi.json", openapi, methods=["GET"]),
            page("index.html"),
            page("docs.html"),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        exception_handlers={
            HTTPException: _http_error,
            UserError: _user_error,
            OSError: _disk_error,
            ClientDisconnect: _gone,
            Exception: _unexpected,
        },
        lifespan=running,
    )
    return Guard(app, host, port, token, api.limits)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # Starlette's own words for an unknown address say nothing of what there is.
    detail = NO_ADDRESS if error.detail in ("Not Found", "Method Not Allowed") else error.detail
    return JSONResponse({"error": detail}, error.status_code, error.headers)


async def _user_error(request: Request, error: Exception) -> Response:
    if _is_full(error):
        return JSONResponse({"error": FULL}, 507)
    return JSONResponse({"error": printable(" ".join(str(error).split()))}, 400)


async def _disk_error(request: Request, error: Exception) -> Response:
    if _is_full(error):
        return JSONResponse({"error": FULL}, 507)
    raise error


def _is_full(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, is that of a full disk or a used-up quota."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None and error.errno in (errno.ENOSPC, errno.EDQUOT)


async def _gone(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the request stopped in the middle"}, 400)  # the client is gone


async def _unexpected(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"unexpected error ({type(error).__name__}); the terminal has the details"}, 500)

"""`clipcil serve`: a server that runs until it is stopped."""

from __future__ import annotations

import secrets
import socket
import threading
import webbrowser
from contextlib import suppress
from pathlib import Path
from types import FrameType

import uvicorn

from clipcil.classifier.model_folder import hold_model
from clipcil.errors import UserError, printable
from clipcil.serve.api import Api
from clipcil.serve.app import build_app
from clipcil.serve.guard import is_loopback
from clipcil.serve.keeper import Keeper
from clipcil.serve.limits import Limits
from clipcil.serve.staging import open_staging


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
        UserError: The folder is in use or holds no model, or the address cannot be listened at.
    """
    limits = limits or Limits()
    with (
        _listen(host, port) as listening,
        hold_model(folder, f"clipcil serve at {_address(host, listening.getsockname()[1])}"),
        open_staging(limits) as staging,
    ):
        port = listening.getsockname()[1]
        token = None if is_loopback(host) else secrets.token_urlsafe(24)
        api = Api(Keeper(folder, method, backbone, device), staging, limits)
        app = build_app(api, host, port, token)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=5
        )
        address = _address(host, port)
        page = f"{address}/?token={token}" if token else address
        print(f"{printable(folder)} is served at {page} (Ctrl-C ends it)", flush=True)
        if token:
            print(
                "others can reach this server: anyone with the address and its token can teach and use the model",
                flush=True,
            )
        if open_page:
            threading.Timer(0.5, webbrowser.open, [page]).start()
        try:
            with suppress(KeyboardInterrupt):  # Ctrl-C is how it is ended
                _Server(config, api).run(sockets=[listening])
        finally:
            api.lessons.close()


class _Server(uvicorn.Server):
    """Closes event streams, which would never end, and refuses waiting pictures when it is asked to stop."""

    def __init__(self, config: uvicorn.Config, api: Api) -> None:
        super().__init__(config)
        self._api = api

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._api.hub.close()
        self._api.predictor.closed = True
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

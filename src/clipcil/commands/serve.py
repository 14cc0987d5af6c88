"""`clipcil serve`: a web page for teaching a model."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from clipcil.commands.learn import Model
from clipcil.commands.types import Device, Download, Name, NewBackbone, Number


def serve(
    model: Model,
    /,
    *,
    host: Annotated[str, Parameter(metavar="NAME")] = "127.0.0.1",
    port: Number = 7860,
    open: bool = True,
    method: Name = None,
    backbone: NewBackbone = None,
    device: Device = "cpu",
    allow_download: Download = False,
) -> None:
    """Serve a web page for teaching a model, and a JSON API.

    Everything stays on this machine. MODEL need not exist yet: the first lesson creates it. With a host other
    than this machine itself, every request needs a token, which is printed at the start.

    For example:
      clipcil serve birds/
      clipcil serve birds/ --host 0.0.0.0 --port 8000 --no-open

    Args:
        model: Folder of the model; created by the first lesson if it does not exist.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        open: Open the page in a browser.
        method: Method of a new model; `clipcil methods` lists them.
    """
    from clipcil.network import allow_downloads
    from clipcil.serve.server import serve_model

    with allow_downloads(allow_download):
        serve_model(model, host, port, open, method, backbone, device)

"""How much a client may ask of the server: every buffer, queue and file has a bound."""

from __future__ import annotations

from dataclasses import dataclass

MB = 2**20


@dataclass(frozen=True)
class Limits:
    """Bounds of one server."""

    picture_bytes: int = 32 * MB
    """Bytes of one picture file."""
    pixels: int = 50_000_000
    """Pixels of one picture; it takes three bytes of memory for each while it is decoded."""
    request_bytes: int = 256 * MB
    """Bytes of one request that carries pictures."""
    request_pictures: int = 64
    """Pictures in one request."""
    model_bytes: int = 1024 * MB
    """Bytes of an uploaded model."""
    buffered_bytes: int = 1280 * MB
    """Bytes of all requests under way together; more are answered with 503."""
    queued_pictures: int = 256
    """Pictures that wait to be predicted; more are answered with 503."""
    batch: int = 32
    """Most pictures that are predicted in one pass."""
    waiting_pictures: int = 20_000
    """Pictures that wait to be taught."""
    waiting_bytes: int = 4096 * MB
    """Bytes on disk of the pictures that wait to be taught."""
    waiting_classes: int = 1000
    """Classes with pictures that wait to be taught."""
    listeners: int = 32
    """Pages that listen for events at the same time."""
    top: int = 100
    """Most classes named for one picture."""

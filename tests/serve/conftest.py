"""Servers and pictures that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.lessons import pictures
from support.server import Server, png, running

NAMES = ["fox", "owl", "rocket", "tiger"]


@pytest.fixture(scope="session")
def emoji() -> dict[str, list[bytes]]:
    """The training pictures of four classes as files."""
    return {name: [png(image) for image in images] for name, images in pictures(NAMES).items()}


@pytest.fixture(scope="session")
def fresh_emoji() -> dict[str, bytes]:
    """A test picture of each."""
    return {name: png(images[0]) for name, images in pictures(NAMES, test=True).items()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on a model that does not exist yet, without training, so that a lesson takes a moment."""
    folder = tmp_path_factory.mktemp("served")
    with running(folder / "model", folder / "cache", method="simplecil") as found:
        yield found

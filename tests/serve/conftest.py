"""Pictures that the tests of this folder share."""

import pytest

from support.lessons import pictures
from support.server import png

NAMES = ["fox", "owl", "rocket", "tiger"]


@pytest.fixture(scope="session")
def emoji() -> dict[str, list[bytes]]:
    """The training pictures of four classes as files."""
    return {name: [png(image) for image in images] for name, images in pictures(NAMES).items()}


@pytest.fixture(scope="session")
def fresh_emoji() -> dict[str, bytes]:
    """A test picture of each."""
    return {name: png(images[0]) for name, images in pictures(NAMES, test=True).items()}

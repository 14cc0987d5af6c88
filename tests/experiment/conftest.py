from pathlib import Path

import pytest
from PIL import Image

from support.lessons import COLOURS, write_tree


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Preprocessed pictures are shared by the tests of this folder alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPCIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six classes of six pictures, a colour each."""
    images = {colour: [Image.new("RGB", (size, 48), colour) for size in range(40, 46)] for colour in COLOURS}
    return write_tree(tmp_path_factory.mktemp("pictures") / "folder", images)

"""Bounds of memory for untrusted pictures and of the columns of predictions."""

import contextlib
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clipcil.cli import main
from clipcil.data import pictures
from clipcil.data.pictures import decode
from support.lessons import plain


@contextlib.contextmanager
def memory_of_at_most(more: int) -> Iterator[None]:
    """The process may take `more` bytes beside what it has; the kernel refuses the rest."""
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (has + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_large_pictures_take_turns_and_little_memory(tmp_path: Path) -> None:
    """At 4,000 × 4,000 what 9,990 × 9,990 does: before, 4 of them took 4 × 16 million × 24 bytes = 1.5 GB."""
    Image.fromarray(np.full((4000, 4000), 40_000, dtype=np.uint16)).save(tmp_path / "grey.png")
    with memory_of_at_most(700 * 2**20), ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda _: decode(tmp_path / "grey.png", "x").getpixel((9, 9)), range(4)))
    assert seen == [(156, 156, 156)] * 4


def test_strips_change_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = np.random.default_rng(0)
    clear = Image.fromarray(chance.integers(0, 256, (50, 30, 4), dtype=np.uint8))
    greys = [Image.fromarray(chance.integers(0, 65536, (50, 30)).astype(kind)) for kind in ("<u2", "<i4", "<f4")]
    whole = [np.asarray(decode(image, "x")) for image in (clear, *greys)]
    monkeypatch.setattr(pictures, "STRIP", 70)
    for image, expected in zip((clear, *greys), whole, strict=True):
        assert np.array_equal(np.asarray(decode(image, "x")), expected)
    white = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")
    assert np.array_equal(whole[0], np.asarray(white))


def test_the_number_of_columns_follows_the_classes(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain("red")[0].save(tmp_path / "a.png")
    main(["predict", str(saved), str(tmp_path / "a.png"), "--csv", "--top", "1000000"])
    assert capsys.readouterr().out.splitlines()[0].count(",") == 3 + 2 * 2

"""The cache of preprocessed pictures: shared, killed, damaged, read-only."""

import errno
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import PIL
import pytest
import torch
from torch import Tensor

from clipcil.data.cache import CHECKSUM, PixelStore
from clipcil.data.pictures import PictureSet
from support.errors import one_line
from support.made_up import encoded

COUNT = 100
FORK = multiprocessing.get_context("fork")


class Small:
    """A preprocessing that takes no time worth speaking of, and counts."""

    shape = (3, 8, 8)

    def __init__(self, wait: float = 0.0, fingerprint: str = "small") -> None:
        self.done, self.wait, self.key = 0, wait, fingerprint

    def picture(self, image: object) -> Tensor:
        self.done += 1
        time.sleep(self.wait)
        return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).astype(np.float32) / 255)

    def finish(self, batch: Tensor) -> Tensor:
        return batch


PICTURES = PictureSet("made", [encoded(i) for i in range(COUNT)], torch.zeros(COUNT, dtype=torch.int64), "identity-1.0")
ALL = torch.arange(COUNT)


@pytest.fixture(scope="module")
def expected() -> Tensor:
    small = Small()
    return torch.stack([small.picture(PICTURES.image(i)) for i in range(COUNT)]).half().float()


def store(folder: Path | None, preprocess: Small, pictures: PictureSet = PICTURES) -> PixelStore:
    return PixelStore(pictures, preprocess, folder)  # type: ignore[arg-type]


def read(opened: Path | PixelStore, preprocess: Small | None = None, rows: Tensor = ALL) -> Tensor:
    if isinstance(opened, Path):
        opened = store(opened, preprocess or Small())
    return opened.read(PICTURES, rows, lambda done, total: None)


def test_each_picture_is_preprocessed_once_per_machine(tmp_path: Path, expected: Tensor) -> None:
    first, second, other = Small(), Small(), Small(fingerprint="other")
    rows = torch.tensor([7, 3, 7, 99])
    assert torch.equal(read(tmp_path, first, rows), expected[rows])
    assert torch.equal(read(tmp_path, second), expected)
    assert (first.done, second.done) == (3, COUNT - 3)
    read(tmp_path, other, rows)
    stems = [f"identity-1.0-{kind}-pillow{PIL.__version__}" for kind in ("other", "small")]
    assert sorted(path.stem for path in (tmp_path / "pixels").iterdir()) == stems and other.done == 3


def test_without_a_folder_nothing_stays(expected: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    temporary = store(None, Small())
    assert torch.equal(read(temporary), expected)
    temporary.close()
    assert not list(tmp_path.iterdir())


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, expected: Tensor) -> None:
    """Damaged, cut, or cut and made as long as before by another process: what is read is never damage or zeros."""
    opened = store(tmp_path, small := Small())
    assert torch.equal(read(opened), expected)
    file = next(tmp_path.glob("pixels/*"))
    with file.open("rb+") as raw:
        raw.seek(5 * (CHECKSUM + 3 * 64 * 2) + 17)
        raw.write(b"\xaa\xbb")
    assert torch.equal(read(opened), expected) and small.done == COUNT + 1
    size = file.stat().st_size
    for lengths in ((100,), (100, size)):
        for length in lengths:
            os.truncate(file, length)
        assert torch.equal(read(opened), expected)
    file.unlink()
    assert torch.equal(read(opened), expected)


def read_slowly(folder: Path, wait: float) -> np.ndarray:
    return read(folder, Small(wait)).numpy()


def test_processes_that_fill_the_same_file(tmp_path: Path, expected: Tensor) -> None:
    with FORK.Pool(4) as pool:
        answers = pool.starmap(read_slowly, [(tmp_path, 0.001 * i) for i in range(4)], chunksize=1)
    assert all(np.array_equal(answer, expected.numpy()) for answer in answers)
    assert torch.equal(read(tmp_path, last := Small()), expected)
    assert last.done == 0


def test_a_killed_writer_leaves_rows_that_are_whole_or_made_again(tmp_path: Path, expected: Tensor) -> None:
    for attempt in range(4):
        victim = FORK.Process(target=read_slowly, args=(tmp_path, 0.004))
        victim.start()
        time.sleep(0.05 + 0.03 * attempt)
        victim.kill()
        victim.join()
    assert torch.equal(read(tmp_path), expected)


def test_a_read_only_cache_is_read_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Tensor
) -> None:
    read(tmp_path, Small(), ALL[:10])
    (tmp_path / "file").write_text("in the way")

    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("clipcil.data.cache.os.open", refuse)
    assert torch.equal(read(tmp_path, Small(), ALL[:10]), expected[:10])
    for folder in (tmp_path, tmp_path / "new", tmp_path / "file"):
        with one_line("CLIPCIL_CACHE"):
            read(folder, Small(), ALL[:20])


def test_a_broken_picture_stops_and_is_named(tmp_path: Path) -> None:
    made = PictureSet("made", [encoded(0), b"broken"], torch.zeros(2, dtype=torch.int64), "other")
    opened = store(tmp_path, Small(), made)
    with one_line("picture 1 of made"):
        opened.read(made, torch.arange(2), lambda done, total: None)
    assert opened.read(made, torch.tensor([0]), lambda done, total: None).shape == (1, 3, 8, 8)

"""The cache of preprocessed pictures: shared, killed, damaged, read-only."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import PIL
import pytest
import torch
from torch import Tensor

from clipcil.data.cache import CHECKSUM, PixelStore
from clipcil.data.pictures import PictureSet
from clipcil.errors import UserError
from support.made_up import encoded

COUNT = 100


class Small:
    """A preprocessing that takes no time worth speaking of, and counts."""

    shape = (3, 8, 8)
    fingerprint = "small"

    def __init__(self, wait: float = 0.0) -> None:
        self.done, self.wait = 0, wait

    def picture(self, image: object) -> Tensor:
        self.done += 1
        time.sleep(self.wait)
        return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).astype(np.float32) / 255)

    def finish(self, batch: Tensor) -> Tensor:
        return batch


def pictures() -> PictureSet:
    return PictureSet("made", [encoded(i) for i in range(COUNT)], torch.zeros(COUNT, dtype=torch.int64), "identity")


def expected() -> Tensor:
    small, made = Small(), pictures()
    return torch.stack([small.picture(made.image(i)) for i in range(COUNT)]).half().float()


def read(folder: Path | None, preprocess: Small, rows: Tensor | None = None) -> Tensor:
    made = pictures()
    store = PixelStore(made, preprocess, folder)  # type: ignore[arg-type]
    return store.read(made, torch.arange(COUNT) if rows is None else rows, lambda done, total: None)


def test_each_picture_is_preprocessed_once_per_machine(tmp_path: Path) -> None:
    first, second = Small(), Small()
    rows = torch.tensor([7, 3, 7, 99])
    assert torch.equal(read(tmp_path, first, rows), expected()[rows])
    assert first.done == 3
    assert torch.equal(read(tmp_path, second), expected())
    assert second.done == COUNT - 3


def test_without_a_folder_nothing_stays() -> None:
    assert torch.equal(read(None, Small()), expected())


def test_a_damaged_row_is_made_again(tmp_path: Path) -> None:
    read(tmp_path, Small())
    with next(tmp_path.glob("pixels/*")).open("rb+") as file:
        file.seek(5 * (CHECKSUM + 3 * 64 * 2) + 17)
        file.write(b"\xaa\xbb")
    again = Small()
    assert torch.equal(read(tmp_path, again), expected())
    assert again.done == 1


@pytest.mark.parametrize("grown", [False, True])
def test_a_cache_cut_while_it_is_read(tmp_path: Path, grown: bool) -> None:
    """Cut, or cut and made as long as before by another process: what is read is never the zeros."""
    made, preprocess = pictures(), Small()
    store = PixelStore(made, preprocess, tmp_path)  # type: ignore[arg-type]
    rows = torch.arange(COUNT)
    assert torch.equal(store.read(made, rows, lambda done, total: None), expected())
    file = next(tmp_path.glob("pixels/*"))
    size = file.stat().st_size
    os.truncate(file, 100)
    if grown:
        os.truncate(file, size)
    assert torch.equal(store.read(made, rows, lambda done, total: None), expected())


def _reader(folder: Path, wait: float, queue: multiprocessing.Queue[bool]) -> None:
    queue.put(bool(torch.equal(read(folder, Small(wait)), expected())))


def test_processes_that_fill_the_same_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    readers = [context.Process(target=_reader, args=(tmp_path, 0.001 * i, queue)) for i in range(4)]
    for reader in readers:
        reader.start()
    answers = [queue.get(timeout=60) for _ in readers]
    for reader in readers:
        reader.join()
    assert answers == [True] * 4
    assert torch.equal(read(tmp_path, last := Small()), expected())
    assert last.done == 0


def test_a_killed_writer_leaves_rows_that_are_whole_or_made_again(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(4):
        victim = context.Process(target=_reader, args=(tmp_path, 0.004, context.Queue()))
        victim.start()
        time.sleep(0.05 + 0.03 * attempt)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
    assert torch.equal(read(tmp_path, Small()), expected())


def test_a_file_taken_away_while_in_use(tmp_path: Path) -> None:
    made = pictures()
    store = PixelStore(made, Small(), tmp_path)  # type: ignore[arg-type]
    for path in tmp_path.glob("pixels/*"):
        path.unlink()
    assert torch.equal(store.read(made, torch.arange(COUNT), lambda done, total: None), expected())


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="CLIPCIL_CACHE"):
        read(tmp_path / "file", Small())


def test_a_read_only_cache_is_read_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(tmp_path, Small(), torch.arange(10))

    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("clipcil.data.cache.os.open", refuse)
    assert torch.equal(read(tmp_path, Small(), torch.arange(10)), expected()[:10])
    with pytest.raises(UserError, match="cannot be used"):
        read(tmp_path, Small(), torch.arange(20))
    with pytest.raises(UserError, match="CLIPCIL_CACHE"):
        read(tmp_path / "new", Small())


def test_a_broken_picture_stops_and_is_named(tmp_path: Path) -> None:
    made = PictureSet("made", [encoded(0), b"broken"], torch.zeros(2, dtype=torch.int64), "other")
    store = PixelStore(made, Small(), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="picture 1 of made is not a picture"):
        store.read(made, torch.arange(2), lambda done, total: None)
    assert store.read(made, torch.tensor([0]), lambda done, total: None).shape == (1, 3, 8, 8)


def test_an_identity_with_a_dot_does_not_mix_up_preprocessings(tmp_path: Path) -> None:
    """`PictureSet.identity` is the caller's word: a version in it is no ending of a file."""
    pictures = PictureSet("mine", [encoded(0)], torch.zeros(1, dtype=torch.int64), "mine-1.0")
    other = Small()
    other.fingerprint = "other"
    for preprocess in (Small(), other):
        PixelStore(pictures, preprocess, tmp_path).read(pictures, torch.tensor([0]), lambda done, total: None)  # type: ignore[arg-type]
        assert preprocess.done == 1
    names = {path.name for path in (tmp_path / "pixels").iterdir()}
    stems = [f"mine-1.0-{kind}-pillow{PIL.__version__}" for kind in ("small", "other")]
    assert names == {f"{stem}.rows" for stem in stems}


def test_another_version_of_pillow_decodes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(tmp_path, Small())
    monkeypatch.setattr("PIL.__version__", "0.0.1")
    again = Small()
    assert torch.equal(read(tmp_path, again), expected()) and again.done == COUNT

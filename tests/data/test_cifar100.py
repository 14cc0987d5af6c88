from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from clipcil.data.dataset import open_dataset
from clipcil.data.datasets import cifar100
from support.made_up import make_tar, refused, shared_data


def test_real_parquet_files() -> None:
    data = open_dataset("cifar100", shared_data("cifar100"))
    assert (len(data.classes), len(data.train), len(data.test)) == (100, 50_000, 10_000)
    assert data.classes[:3] == ["apple", "aquarium fish", "baby"]
    assert data.train.labels.bincount().tolist() == [500] * 100
    assert data.test.labels.bincount().tolist() == [100] * 100
    assert data.test.image(9_999).size == (32, 32)


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Pickles of the form the official ones have, with their checksums as the published ones."""
    random = np.random.default_rng(0)
    tables = {"meta": {b"fine_label_names": [f"class_{i}".encode() for i in range(100)], b"coarse_label_names": []}}
    for part, count in (("train", 200), ("test", 100)):
        rows = random.integers(0, 256, (count, 3072), dtype=np.uint8)
        tables[part] = {b"data": rows, b"fine_labels": [i % 100 for i in range(count)]}  # type: ignore[dict-item]
    contents = {name: pickle.dumps(table, protocol=2) for name, table in tables.items()}
    monkeypatch.setattr(cifar100, "MD5", {name: hashlib.md5(each).hexdigest() for name, each in contents.items()})
    return contents


def write(folder: Path, contents: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def test_folder_and_archive(tmp_path: Path, official: dict[str, bytes]) -> None:
    folder = write(tmp_path / "cifar-100-python", official)
    (tmp_path / "a").mkdir()
    members = [(f"cifar-100-python/{name}", official[name]) for name in official]
    archive = make_tar(tmp_path / "a" / "cifar-100-python.tar.gz", members)
    for root in (folder, tmp_path, archive, archive.parent):
        data = open_dataset("cifar100", root)
        assert data.classes[:2] == ["class 0", "class 1"]
        assert (len(data.train), len(data.test)) == (200, 100)
        assert data.train.labels[:3].tolist() == [0, 1, 2]
    rows = pickle.loads(official["train"], encoding="bytes")[b"data"]
    red_green_blue = np.asarray(data.train.image(5))
    assert np.array_equal(red_green_blue[:, :, 1].reshape(-1), rows[5, 1024:2048])


def test_a_file_with_another_checksum_is_not_opened(tmp_path: Path, official: dict[str, bytes]) -> None:
    mark = tmp_path / "it ran"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch '{mark}'",)

    write(tmp_path / "x", {**official, "train": pickle.dumps(Evil())})
    refused("cifar100", "MD5", tmp_path / "x")
    assert not mark.exists()


def test_missing_and_partial(tmp_path: Path) -> None:
    refused("cifar100", "cifar-100-python.tar.gz", tmp_path)
    make_tar(tmp_path / "cifar-100-python.tar.gz", [("cifar-100-python/meta", b"x")])
    refused("cifar100", "meta", tmp_path)

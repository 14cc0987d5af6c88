"""CIFAR-100, CUB-200 and ImageNet-R: official folders and archives, found, unpacked once, refused when damaged."""

import hashlib
import multiprocessing
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clipcil.data.dataset import Dataset, open_dataset
from clipcil.data.datasets import cifar100
from clipcil.data.datasets.official import unpack
from support.errors import one_line
from support.made_up import cub_tree, imagenet_r_tree, make_tar, refused, shared_data, write_lines
from support.towers import Bomb


def test_unpacked_once_with_the_archives_times(tmp_path: Path, own_cache: Path) -> None:
    (own_cache / "unpacked" / ".tmp").mkdir(parents=True)
    (own_cache / "unpacked" / ".tmp" / "half.txt").touch()  # of a killed process
    archive = make_tar(tmp_path / os.fsdecode(b"\xe9.tgz"), [("top/in/x.txt", b"hello"), ("./y.txt", b"")])
    folder = unpack(archive)
    assert folder.is_relative_to(own_cache) and sorted(path.name for path in folder.iterdir()) == ["top", "y.txt"]
    assert (folder / "top/in/x.txt").read_bytes() == b"hello"
    assert (folder / "y.txt").stat().st_mtime == 0
    (folder / "mark").touch()
    assert (unpack(archive) / "mark").exists()
    os.utime(archive, (5, 5))
    assert unpack(archive) != folder, "a changed archive is another archive"
    assert not (folder.parent / ".tmp").exists()


def test_members_that_lead_out_are_refused(tmp_path: Path) -> None:
    link = tarfile.TarInfo("evil")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    for wrong in (("../evil", b"evil"), link):
        archive = make_tar(tmp_path / "a.tar.gz", [("good.txt", b"x"), wrong])
        with one_line(archive.name):
            unpack(archive)
    assert not any("evil" in path.name for path in tmp_path.rglob("*"))


def test_damaged_archives_and_a_cache_that_is_a_file_are_named(tmp_path: Path, own_cache: Path) -> None:
    archive = make_tar(tmp_path / "a.tgz", [("a", os.urandom(50_000))])
    whole = archive.read_bytes()
    middle = len(whole) // 2
    changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for content in (b"not an archive", whole[:middle], changed):
        archive.write_bytes(content)
        with one_line(archive.name):
            unpack(archive)
    shutil.rmtree(own_cache)
    own_cache.write_text("in the way")
    with one_line("CLIPCIL_CACHE"):
        unpack(archive)


def test_two_processes_unpack_at_once(tmp_path: Path) -> None:
    archive = make_tar(tmp_path / "a.tgz", [(f"d/{i}", bytes([i]) * 2000) for i in range(200)])
    with multiprocessing.get_context("fork").Pool(3) as pool:
        folders = pool.map(unpack, [archive] * 3)
    assert len(set(folders)) == 1
    assert [(folders[0] / "d" / str(i)).read_bytes() for i in range(200)] == [bytes([i]) * 2000 for i in range(200)]


@pytest.mark.parametrize(
    ("name", "tree", "archive"),
    [("cub200", cub_tree, "CUB_200_2011.tgz"), ("imagenet-r", imagenet_r_tree, "imagenet-r.tar")],
)
def test_a_dataset_is_found_in_its_folder_and_its_archive(
    tmp_path: Path, name: str, tree: Callable[[Path], Path], archive: str
) -> None:
    home = tree(tmp_path / "tree")
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "packed" / archive, "w:gz" if archive.endswith("gz") else "w") as tar:
        tar.add(home, home.name)
    found = [home, home.parent, tmp_path / "packed", tmp_path / "packed" / archive]
    counts = {(len(data.train), len(data.test)) for data in (open_dataset(name, at, {"check": "no"}) for at in found)}
    assert len(counts) == 1
    refused(name, archive, tmp_path / "nowhere")
    refused(name, "3 classes and 15 pictures", home)


def test_the_real_cub_has_the_official_split() -> None:
    archive = shared_data("CUB_200_2011-64px.tgz")
    data = open_dataset("cub200", archive)
    assert (len(data.classes), len(data.train), len(data.test)) == (200, 5994, 5794)
    assert data.classes[:2] + data.classes[-1:] == ["Black footed Albatross", "Laysan Albatross", "Common Yellowthroat"]
    assert data.train.labels.bincount().max() == 30
    assert data.train.image(0).size == (64, 64)
    assert Path(data.train.describe(0)).name == "Black_Footed_Albatross_0009_34.jpg"
    random = open_dataset("cub200", archive.parent, {"split": "random", "split_seed": "1993"})
    assert (len(random.train), len(random.test)) == (9430, 2358)
    assert random.train.identity == data.train.identity, "both splits share what is cached"


def test_cub_in_small_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    home = cub_tree(tmp_path)
    data = open_dataset("cub200", tmp_path, {"check": "no"})
    assert data.classes == ["Grey a tailed Bird", "Grey b tailed Bird", "Grey c tailed Bird"]
    assert data.train.labels.tolist() == [0, 0, 1, 1, 2, 2] and len(data.test) == 9
    whole = (home / "images.txt").read_text()
    (home / "images.txt").write_text(f"{whole}no number")
    refused("cub200", "'no number'", home, check="no")
    (home / "images.txt").write_text(whole)
    missing = next((home / "images").rglob("*.jpg"))
    missing.unlink()
    refused("cub200", missing.name, home, check="no")


def test_the_real_cifar100_in_parquet_files() -> None:
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


def test_cifar100_in_a_folder_and_an_archive(
    tmp_path: Path, official: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused("cifar100", "cifar-100-python.tar.gz", tmp_path)
    folder = tmp_path / "cifar-100-python"
    for place in (folder, tmp_path / "a"):
        place.mkdir()
    for name, content in official.items():
        (folder / name).write_bytes(content)
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
    make_tar(tmp_path / "a" / "cifar-100-python.tar.gz", [("cifar-100-python/meta", b"x")])
    refused("cifar100", "meta", tmp_path / "a")
    (folder / "train").write_bytes(pickle.dumps(Bomb()))
    monkeypatch.chdir(tmp_path)
    refused("cifar100", "MD5", folder)
    assert not Path("exploded").exists(), "a pickle with another checksum is not opened"


ALL = [f"{wnid}/art_{i}.jpg" for wnid in ("n01443537", "n01484850", "n02106662") for i in range(5)]


def renditions(root: Path, **options: object) -> Dataset:
    return open_dataset("imagenet-r", root, {"check": "no", **options})


def names(data: Dataset, part: str) -> list[str]:
    pictures = getattr(data, part)
    return ["/".join(Path(pictures.describe(i)).parts[-2:]) for i in range(len(pictures))]


def test_renditions_have_names_from_their_readme(tmp_path: Path) -> None:
    home = imagenet_r_tree(tmp_path)
    data = renditions(home)
    assert data.classes == ["goldfish", "great white shark", "German shepherd dog"]
    assert (len(data.train), len(data.test)) == (12, 3)
    assert sorted(names(data, "train") + names(data, "test")) == ALL
    assert names(renditions(home, split_seed=1), "test") != names(data, "test")
    refused("imagenet-r", "train_list and test_list", home, train_list="x")
    write_lines(home / "README.txt", ["n01443537 goldfish"])
    refused("imagenet-r", "n01484850", home, check="no")


def test_yaml_lists(tmp_path: Path) -> None:
    home = imagenet_r_tree(tmp_path)
    lists = {}
    for part, entries in (("train", ALL[3:]), ("test", ALL[:3])):
        lines = ["data:", *(f"- data/imagenet-r/{part}/{entry}" for entry in entries)]
        lines += ["targets:", *("- 7" for _ in entries)]
        lists[f"{part}_list"] = write_lines(tmp_path / f"imagenet-r_{part}.yaml", lines)
    data = renditions(home, **lists)
    assert (names(data, "test"), names(data, "train")) == (ALL[:3], ALL[3:])
    assert data.test.labels.tolist() == [0, 0, 0], "the class is in the path; targets are not trusted"
    assert data.notes == ()


def test_one_text_list(tmp_path: Path) -> None:
    home, path = imagenet_r_tree(tmp_path), tmp_path / "split.txt"
    write_lines(path, ["train", *ALL[5:], "n02106662/test_img_R.py", "", "test", *ALL[:4]])
    data = renditions(home, split_list=path)
    assert (names(data, "test"), names(data, "train")) == (ALL[:4], ALL[5:])
    assert len(data.notes) == 2
    assert "n02106662/test_img_R.py" in data.notes[0] and " 1 pictures" in data.notes[1]
    for lines, said in (
        (["train", ALL[0]], "no test pictures"),
        (["train", ALL[0], "test", "n01443537/art_99.jpg"], "n01443537/art_99.jpg"),
        (["train", ALL[0], "test", ALL[0]], ALL[0]),
    ):
        refused("imagenet-r", said, home, check="no", split_list=write_lines(path, lines))

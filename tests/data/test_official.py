"""Official folders and archives: found where they are, unpacked once, refused when damaged."""

from __future__ import annotations

import multiprocessing
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from clipcil.data.dataset import open_dataset
from clipcil.data.datasets.official import unpack
from support.errors import one_line
from support.made_up import cub_tree, imagenet_r_tree, make_tar, refused


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


@pytest.mark.parametrize("how", ["gz", "bz2", "xz"])
def test_damaged_archives_are_named(tmp_path: Path, how: str) -> None:
    whole = make_tar(tmp_path / "a.tgz", [("a", os.urandom(50_000))], how).read_bytes()
    middle = len(whole) // 2
    changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for number, content in enumerate((b"", b"not an archive", whole[:middle], changed)):
        path = tmp_path / f"cut{number}.tgz"
        path.write_bytes(content)
        with one_line(path.name):
            unpack(path)


def test_a_cache_that_is_a_file(tmp_path: Path, own_cache: Path) -> None:
    own_cache.write_text("in the way")
    with one_line("CLIPCIL_CACHE"):
        unpack(make_tar(tmp_path / "a.tgz", [("a", b"x")]))


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

from __future__ import annotations

import multiprocessing
import os
import tarfile
from pathlib import Path

import pytest

from clipcil.data.datasets.official import unpack
from clipcil.errors import UserError
from support.made_up import make_tar


def test_unpacked_once_with_the_archives_times(tmp_path: Path, own_cache: Path) -> None:
    info = tarfile.TarInfo("top/in")
    info.type = tarfile.DIRTYPE
    archive = make_tar(tmp_path / "a.tgz", [info, ("top/in/x.txt", b"hello"), ("./y.txt", b"")])
    folder = unpack(archive)
    assert folder.is_relative_to(own_cache)
    assert (folder / "top/in/x.txt").read_bytes() == b"hello"
    assert (folder / "y.txt").stat().st_mtime == 0
    (folder / "mark").touch()
    assert (unpack(archive) / "mark").exists()
    os.utime(archive, (5, 5))
    assert unpack(archive) != folder, "a changed archive is another archive"
    assert not (folder.parent / ".tmp").exists()


def test_what_a_killed_process_had_unpacked_is_deleted(tmp_path: Path, own_cache: Path) -> None:
    (own_cache / "unpacked" / ".tmp").mkdir(parents=True)
    (own_cache / "unpacked" / ".tmp" / "half.txt").touch()
    folder = unpack(make_tar(tmp_path / "a.tgz", [("x.txt", b"hello")]))
    assert [path.name for path in folder.iterdir()] == ["x.txt"]


def member(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info


@pytest.mark.parametrize(
    "wrong",
    [
        ("../evil", b"evil"),
        ("a/../../evil", b"evil"),
        member("evil", tarfile.SYMTYPE),
        member("evil", tarfile.LNKTYPE),
        member("evil", tarfile.FIFOTYPE),
    ],
)
def test_members_that_lead_out_are_refused(tmp_path: Path, wrong: tarfile.TarInfo | tuple[str, bytes]) -> None:
    archive = make_tar(tmp_path / "a.tar.gz", [("good.txt", b"x"), wrong])
    with pytest.raises(UserError, match=archive.name):
        unpack(archive)
    assert not any("evil" in path.name for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("how", ["gz", "bz2", "xz"])
def test_damaged_archives(tmp_path: Path, how: str) -> None:
    whole = make_tar(tmp_path / "a.tgz", [("a", os.urandom(50_000))], how).read_bytes()
    middle = len(whole) // 2
    for number, content in enumerate(
        (b"", b"not an archive", whole[:middle], whole[:middle] + b"#" + whole[middle + 1 :])
    ):
        path = tmp_path / f"cut{number}.tgz"
        path.write_bytes(content)
        with pytest.raises(UserError, match=path.name):
            unpack(path)


def test_an_archive_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    archive = make_tar(folder / os.fsdecode(b"\xe9.tgz"), [("x.txt", b"hello")])
    assert (unpack(archive) / "x.txt").read_bytes() == b"hello"


def test_cache_that_is_a_file(tmp_path: Path, own_cache: Path) -> None:
    own_cache.write_text("in the way")
    with pytest.raises(UserError, match="set CLIPCIL_CACHE"):
        unpack(make_tar(tmp_path / "a.tgz", [("a", b"x")]))


def test_two_processes_unpack_at_once(tmp_path: Path) -> None:
    archive = make_tar(tmp_path / "a.tgz", [(f"d/{i}", bytes([i]) * 2000) for i in range(200)])
    with multiprocessing.get_context("fork").Pool(3) as pool:
        folders = pool.map(unpack, [archive] * 3)
    assert len(set(folders)) == 1
    assert [(folders[0] / "d" / str(i)).read_bytes() for i in range(200)] == [bytes([i]) * 2000 for i in range(200)]

from __future__ import annotations

import multiprocessing
import os
import tarfile
from pathlib import Path

import pytest
from made_up import make_tar

from clipcil.data import archives
from clipcil.data.archives import unpack
from clipcil.errors import UserError
from clipcil.files import run_lock


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
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def test_what_a_killed_process_had_unpacked_is_deleted(tmp_path: Path, own_cache: Path) -> None:
    archive, folder = make_tar(tmp_path / "a.tgz", [("x.txt", b"hello")]), own_cache / "unpacked"
    for name in ("killed", "at-it", "just-begun"):
        (folder / f".unpack-{name}" / "all").mkdir(parents=True)
        os.utime(folder / f".unpack-{name}", (5, 5) if name != "just-begun" else None)
    (folder / ".unpack-link").symlink_to(tmp_path)
    with run_lock(folder / ".unpack-at-it"):
        os.utime(folder / ".unpack-at-it", (5, 5))
        made = unpack(archive)
    assert {path.name for path in folder.iterdir()} == {
        made.name, ".unpack-at-it", ".unpack-just-begun", ".unpack-link"
    }  # fmt: skip
    assert archive.exists()


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/tmp/evil", "a\\..\\evil", "C:/evil"])
def test_paths_that_climb_out_are_refused(tmp_path: Path, own_cache: Path, name: str) -> None:
    archive = make_tar(tmp_path / "a.tar.gz", [("good.txt", b"x"), (name, b"evil")])
    with pytest.raises(UserError, match="leads out of the archive"):
        unpack(archive)
    assert list((own_cache / "unpacked").iterdir()) == [], "nothing is left of it"
    assert not any("evil" in path.name for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.linkname = kind, "/etc/passwd"
    with pytest.raises(UserError, match="link or a device"):
        unpack(make_tar(tmp_path / "a.tgz", [info]))


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = make_tar(tmp_path / "a.tgz", [("a", b"x" * 60), ("b", b"x" * 60)])
    monkeypatch.setattr(archives, "MAX_BYTES", 100)
    with pytest.raises(UserError, match="unpack it by hand"):
        unpack(archive)
    monkeypatch.setattr(archives, "MAX_BYTES", 1000)
    monkeypatch.setattr(archives, "MAX_FILES", 1)
    with pytest.raises(UserError, match="unpack it by hand"):
        unpack(archive)


@pytest.mark.parametrize("how", ["gz", "bz2", "xz"])
def test_damaged_archives(tmp_path: Path, how: str) -> None:
    whole = make_tar(tmp_path / "a.tgz", [("a", os.urandom(50_000))], how).read_bytes()
    middle = len(whole) // 2
    for number, content in enumerate(
        (b"", b"not an archive", whole[:middle], whole[:middle] + b"#" + whole[middle + 1 :])
    ):
        path = tmp_path / f"cut{number}.tgz"
        path.write_bytes(content)
        with pytest.raises(UserError, match="not a complete archive"):
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

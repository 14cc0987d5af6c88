"""Untrusted archives are unpacked into the cache; paths and links that lead out of it are refused."""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import tarfile
import tempfile
import time
import zlib
from contextlib import suppress
from pathlib import Path, PurePosixPath

from clipcil.errors import UserError, first_line, printable
from clipcil.files import InUseError, cache_folder, run_lock

MAX_FILES = 2_000_000
MAX_BYTES = 64 * 2**30
"""More than any dataset here; an archive that claims more is refused before the disk is full."""
MAX_GROWTH = 100
"""How many times its own size an archive above 1 GiB may hold: pictures are compressed already."""
MAX_HEADER = 2**20
"""Bytes of an extended header (a long name, PAX records), which tarfile reads into memory in one piece."""
MAX_DEPTH = 100
PART = ".unpack-"
"""How the names of folders begin that are being unpacked into."""
ENDINGS = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(ENDINGS) and path.is_file()


def find_archive(folder: Path, pattern: str) -> Path | None:
    """The archive in `folder` whose name matches the glob `pattern`, if there is one."""
    return next((path for path in sorted(folder.glob(pattern)) if is_archive(path)), None)


def unpack(archive: Path) -> Path:
    """The folder with the contents of the archive: unpacked once, completely or not at all, and used by later runs."""
    try:
        status = archive.stat()
        mark = f"{archive.resolve()}|{status.st_size}|{status.st_mtime_ns}"
        digest = hashlib.sha256(mark.encode("utf-8", "surrogateescape")).hexdigest()
        stem = archive.name.split(".")[0]
        target = cache_folder() / "unpacked" / f"{stem}-{digest[:16]}"
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with tempfile.TemporaryDirectory(prefix=PART, dir=target.parent) as part, run_lock(Path(part)):
            _extract(archive, Path(part) / "all")
            try:
                (Path(part) / "all").rename(target)
            except OSError:
                if not target.is_dir():  # another process was first: its copy is as good as ours
                    raise
        return target
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{archive} is not a complete archive ({first_line(error)}); download it again") from error
    except OSError as error:
        if isinstance(error, PermissionError) or error.filename or error.errno:
            raise UserError(
                f"cannot unpack {archive} ({error.strerror or error}); free some room, or set CLIPCIL_CACHE to a folder"
                " that can be written"
            ) from error
        raise UserError(f"{archive} is not a complete archive ({first_line(error)}); download it again") from error


def _sweep(folder: Path) -> None:
    """Delete what killed processes had begun to unpack. One that is still at it holds the lock of its folder, or has
    made that folder within the last hour and will."""
    for part in folder.glob(f"{PART}*"):
        with suppress(OSError, InUseError):
            if not part.is_symlink() and part.stat().st_mtime < time.time() - 3600:
                with run_lock(part):
                    shutil.rmtree(part)


def _extract(archive: Path, into: Path) -> None:
    """Plain files and folders only, each below `into`. Written by hand: no owner, mode or link is taken over."""
    into.mkdir()
    total = 0
    most = min(MAX_BYTES, max(2**30, MAX_GROWTH * archive.stat().st_size))
    with tarfile.open(archive, tarinfo=_Member) as tar:
        for number, member in enumerate(tar):
            tar.members.clear()  # type: ignore[attr-defined]  # else every header stays in memory: 2 kB for each file
            name = safe_name(archive, member.name)
            total += member.size
            if total > most or number >= MAX_FILES:
                raise UserError(f"{archive} holds more than {MAX_FILES} files or {most} bytes; unpack it by hand")
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                raise UserError(
                    f"{archive}: '{printable(member.name)}' is a link or a device; such an archive is not unpacked"
                )
            source = tar.extractfile(member)
            if source is None:
                raise UserError(f"{archive}: '{member.name}' cannot be read")
            path = into / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with source, path.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            # The archive's own time, so that what is cached about a picture is found again after unpacking again.
            with suppress(OverflowError, ValueError):  # a time that no file can have
                os.utime(path, (member.mtime, member.mtime))
        # A compressed file has its checksum at the end, behind the last member: read on, so that it is looked at.
        for _ in range(1024):
            if tar.fileobj is None or not tar.fileobj.read(1 << 20):
                break


class _Member(tarfile.TarInfo):
    """A header whose extension is not read into memory before its size has been looked at."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        member = super().frombuf(buf, encoding, errors)
        if member.type not in (*tarfile.SUPPORTED_TYPES, b"x", b"g", b"X") or member.isreg():
            return member
        if member.size > MAX_HEADER:
            raise UserError(f"the archive has a header of {member.size} bytes; such an archive is not unpacked")
        return member


def safe_name(archive: Path, name: str) -> PurePosixPath:
    """The member's path if it stays below the folder it is unpacked into; an error if it would climb out."""
    path = PurePosixPath(name)
    if len(path.parts) > MAX_DEPTH:
        raise UserError(f"{archive}: a path has more than {MAX_DEPTH} folders; such an archive is not unpacked")
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or ":" in name.split("/")[0]:
        raise UserError(
            f"{archive}: the path '{printable(name)}' leads out of the archive; such an archive is not unpacked"
        )
    return path

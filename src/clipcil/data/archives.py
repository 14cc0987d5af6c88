"""Archives of datasets, unpacked once into the cache."""

from __future__ import annotations

import hashlib
import lzma
import tarfile
import zlib
from pathlib import Path

from clipcil.errors import UserError, first_line
from clipcil.storage import LOCK, TEMPORARY, cache_folder, sweep

ENDINGS = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")


def is_archive(path: Path) -> bool:
    """Whether `path` is a file with the ending of a tar archive."""
    return path.name.lower().endswith(ENDINGS) and path.is_file()


def find_archive(folder: Path, pattern: str) -> Path | None:
    """The archive in `folder` whose name matches the glob `pattern`, if there is one."""
    return next((path for path in sorted(folder.glob(pattern)) if is_archive(path)), None)


def unpack(archive: Path) -> Path:
    """The folder with the contents of the archive. It is unpacked once, whole or not at all, for all later runs.

    Raises:
        UserError: The archive is damaged, has a member outside its folder, or does not fit on the disk.
    """
    from filelock import FileLock

    try:
        status = archive.stat()
        mark = f"{archive.resolve()}|{status.st_size}|{status.st_mtime_ns}"
        digest = hashlib.sha256(mark.encode("utf-8", "surrogateescape")).hexdigest()
        folder = cache_folder() / "unpacked"
        target = folder / f"{archive.name.split('.')[0]}-{digest[:16]}"
        if target.is_dir():
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / LOCK):  # waits for a process that unpacks at the same time
            sweep(folder)
            if not target.is_dir():
                _extract(archive, folder / TEMPORARY)
                (folder / TEMPORARY).rename(target)
        return target
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(archive, error) from error
    except OSError as error:
        if error.errno is None:  # gzip and bz2 report damage without a number
            raise _damaged(archive, error) from error
        raise UserError(
            f"cannot unpack {archive} ({error.strerror or error}); free some room, or set CLIPCIL_CACHE to a folder"
            " that can be written"
        ) from error


def _extract(archive: Path, into: Path) -> None:
    """Unpack with Python's filter "data": a member or a link that leads out of `into`, or a device, is an error.

    Files keep the archive's times, so that what is cached about a picture is found again after unpacking again.
    """
    with tarfile.open(archive) as tar:
        tar.extractall(into, filter="data")
        # A compressed file has its checksum behind the last member: read on, so that it is checked.
        while tar.fileobj is not None and tar.fileobj.read(1 << 20):
            pass


def _damaged(archive: Path, error: Exception) -> UserError:
    return UserError(f"{archive} is not an archive that can be unpacked ({first_line(error)}); download it again")

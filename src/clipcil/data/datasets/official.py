"""The official folder or archive of a dataset: find it, unpack it once into the cache, and check its counts."""

from __future__ import annotations

import hashlib
import lzma
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from filelock import FileLock
from pydantic import Field

from clipcil.errors import UserError, first_line
from clipcil.storage import LOCK, TEMPORARY, cache_folder, sweep

TestShare = Annotated[float, Field(ge=0.001, le=0.999)]
"""Share of the pictures that are test pictures, in a split by seed."""


@dataclass(frozen=True)
class Official:
    """How a dataset is distributed by its authors."""

    title: str
    mark: str
    """Glob of a file or folder that the dataset's folder holds."""
    archive: str
    """Glob of the archive's name; empty where clipcil does not unpack it."""
    advice: str
    """What to put where."""
    classes: int
    pictures: int
    unit: str = "pictures"

    def find(self, root: Path) -> Path | None:
        """The dataset's folder: `root`, a folder in it, or one in the archive that `root` is or holds."""
        home, inside = self._home(root), sorted(root.glob(self.archive)) if self.archive else []
        archive = next((path for path in (root, *inside) if is_archive(path)), None)
        return self._home(unpack(archive)) if home is None and archive is not None else home

    def need(self, root: Path) -> Path:
        """`find`, with an error where there is no such folder."""
        home = self.find(root)
        if home is None:
            raise UserError(
                f"{self.title} is not in {root}: {self.advice} there, or name another place with --data-root"
            )
        return home

    def check(self, home: Path, classes: int, pictures: int) -> None:
        """Refuse a folder with other counts than the official ones."""
        if (classes, pictures) != (self.classes, self.pictures):
            raise UserError(
                f"{home} has {classes} classes and {pictures} {self.unit}, but {self.title} has {self.classes} and"
                f" {self.pictures}; unpack it again, or set the data option check=no to use it all the same"
            )

    def _home(self, root: Path) -> Path | None:
        marks = (*sorted(root.glob(self.mark)), *sorted(root.glob(f"*/{self.mark}")))
        return marks[0].parent if marks else None


def is_archive(path: Path) -> bool:
    """Whether `path` is a file with the ending of a tar archive."""
    return path.name.lower().endswith((".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")) and path.is_file()


def unpack(archive: Path) -> Path:
    """The folder with the contents of the archive. It is unpacked once, whole or not at all, for all later runs.

    Python's filter "data" refuses members and links that lead out of the folder, and devices. Files keep the archive's
    times, so that what is cached about a picture is found again after unpacking again.
    """
    try:
        status = archive.stat()
        mark = f"{archive.resolve()}|{status.st_size}|{status.st_mtime_ns}"
        digest = hashlib.sha256(mark.encode("utf-8", "surrogateescape")).hexdigest()
        folder = cache_folder() / "unpacked"
        target = folder / f"{archive.name.split('.')[0]}-{digest[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / LOCK):  # waits for a process that unpacks at the same time
            if not target.is_dir():
                sweep(folder)
                with tarfile.open(archive) as tar:
                    tar.extractall(folder / TEMPORARY, filter="data")
                    # A compressed file has its checksum behind the last member: read on, so that it is checked.
                    while tar.fileobj is not None and tar.fileobj.read(1 << 20):
                        pass
                (folder / TEMPORARY).rename(target)
        return target
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # gzip and bz2 report damage without a number
            advice = "free some room, or set CLIPCIL_CACHE to a folder that can be written"
            raise UserError(f"cannot unpack {archive} ({error.strerror}); {advice}") from error
        raise UserError(f"{archive} is not a whole archive ({first_line(error)}); download it again") from error

"""The official folder or archive of a dataset: find it, unpack it once into the cache, and check its counts."""

import hashlib
import lzma
import tarfile
import zlib
from pathlib import Path

from filelock import FileLock

from clipcil.data.dataset import SplitOptions
from clipcil.errors import UserError, first_line
from clipcil.settings import options
from clipcil.storage import LOCK, TEMPORARY, cache_folder, sweep

ARCHIVES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")


@options
class OfficialOptions(SplitOptions):
    check: bool = True
    """Refuse a dataset without the official numbers of classes and pictures."""


def find_home(root: Path, mark: str, archive: str) -> Path | None:
    """The dataset's folder: `root`, a folder in it, or one in the archive that `root` is or holds.

    Args:
        root: The folder or archive that the user named.
        mark: Glob of a file or folder that the dataset's folder holds.
        archive: Glob of the archive's name.
    """
    if marks := [*sorted(root.glob(mark)), *sorted(root.glob(f"*/{mark}"))]:
        return marks[0].parent
    for path in (root, *sorted(root.glob(archive))):
        if path.name.lower().endswith(ARCHIVES) and path.is_file():
            return find_home(unpack(path), mark, archive)
    return None


def need_home(root: Path, title: str, needs: str, mark: str, archive: str) -> Path:
    """`find_home`, with an error that says what is needed where there is no such folder."""
    home = find_home(root, mark, archive)
    if home is None:
        raise not_there(root, title, needs)
    return home


def not_there(root: Path, title: str, needs: str) -> UserError:
    """The error for a folder without the dataset."""
    return UserError(f"{title} is not in {root}: put {needs} there, or name another place with --data-root")


def check_counts(
    home: Path, title: str, found: tuple[int, int], official: tuple[int, int], of: str = "pictures"
) -> None:
    """Refuse a folder with other numbers of classes and pictures than the official ones."""
    if found != official:
        raise UserError(
            f"{home} has {found[0]} classes and {found[1]} {of}, but {title} has {official[0]} and {official[1]};"
            " unpack it again, or set the data option check=no to use it all the same"
        )


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

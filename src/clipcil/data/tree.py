"""Finding pictures in folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from clipcil.errors import UserError

SUFFIXES = frozenset(
    {
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".png",
        ".bmp",
        ".gif",
        ".webp",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
        ".pbm",
        ".avif",
    }
)
"""Endings of the files taken for pictures. What a file holds is found by its contents, not by its ending."""


def list_files(folder: Path, suffixes: Iterable[str] = SUFFIXES) -> list[Path]:
    """Files below `folder` with one of the `suffixes`, sorted by name; hidden files and folders are left out.

    Links to folders are followed, but a folder is never entered again from inside itself, so loops end. A link that
    leads nowhere is listed like any file: reading it names it.
    """
    wanted = frozenset(suffixes)
    found = [path for path in _walk(folder, ()) if path.suffix.lower() in wanted]
    return sorted(found, key=lambda path: path.as_posix())


def list_folders(folder: Path) -> list[Path]:
    """The folders in `folder`, sorted by name, without hidden ones."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_dir())
    except OSError as error:
        raise UserError(f"cannot look into {folder}: {error.strerror or error}") from error


def _walk(folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    try:
        status = folder.stat()
        entries = list(os.scandir(folder))
    except OSError as error:
        raise UserError(f"cannot look into {folder}: {error.strerror or error}") from error
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        path = Path(entry.path)
        # Path.is_dir() says no to a link that leads to itself, where the entry's own test raises.
        if path.is_dir():
            yield from _walk(path, (*above, here))
        else:
            yield path


def need_folder(root: Path, what: str) -> Path:
    """`root`, which must be a folder that is there."""
    if not root.exists():
        raise UserError(f"{what}: there is no folder {root}; name the right one with --data-root")
    if not root.is_dir():
        raise UserError(f"{what}: {root} is not a folder; name the right one with --data-root")
    return root

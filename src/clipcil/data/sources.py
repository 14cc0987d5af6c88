"""Pictures as users give them: files in folders, paths, bytes, PIL images and arrays."""

import os
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from clipcil.data.pictures import Picture
from clipcil.errors import UserError

HEIC = (".heic", ".heif")
"""Endings of the pictures of many phones, which need the extra `heic`."""
_USUAL = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".avif")
SUFFIXES = frozenset((*_USUAL, ".ppm", ".pgm", ".pbm", *(HEIC if find_spec("pillow_heif") else ())))
"""Endings of the files taken for pictures. What a file holds is found by its contents, not by its ending."""


def list_files(folder: Path, suffixes: Iterable[str] = SUFFIXES) -> list[Path]:
    """Files below `folder` with one of the `suffixes`, sorted by name; hidden files and folders are left out.

    Links to folders are followed, but a folder is entered once, however many links lead to it: loops end, and no
    picture counts twice. A link that leads nowhere is listed like any file: reading it names it.
    """
    wanted = frozenset(suffixes)
    found = [path for path in walk(folder) if path.suffix.lower() in wanted]
    return sorted(found, key=lambda path: path.as_posix())


def list_folders(folder: Path) -> list[Path]:
    """The folders in `folder`, sorted by name, without hidden ones."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_dir())
    except OSError as error:
        raise _unreadable(error) from error


def walk(root: Path) -> Iterator[Path]:
    """Every file below `root` by the rules of `list_files`, whatever its ending; in no order."""

    def stop(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError) or Path(error.filename) == root:  # others were deleted just now
            raise _unreadable(error) from error

    seen: set[tuple[int, int]] = set()
    waiting, links = [root], list[Path]()
    while waiting or links:  # links are entered last: a folder that is really here is listed by its own path
        folder = (waiting or links).pop()
        for _, inside, files in islice(os.walk(folder, onerror=stop), 1):  # one level, as os.walk recurses
            try:
                status = folder.stat()
            except FileNotFoundError:
                continue
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            for path in (folder / name for name in sorted(inside, reverse=True) if not name.startswith(".")):
                (links if path.is_symlink() else waiting).append(path)
            yield from (folder / name for name in files if not name.startswith("."))


def _unreadable(error: OSError) -> UserError:
    return UserError(f"cannot look into {error.filename}: {error.strerror or error}")


def no_pictures(folder: Path, advice: str = "") -> UserError:
    """The error for a folder in which `list_files` has found nothing; `advice` says what to do."""
    if not SUFFIXES.issuperset(HEIC) and list_files(folder, HEIC):
        return UserError(f"the pictures in {folder} are HEIC files, which need an extra: pip install 'clipcil[heic]'")
    return UserError(f"there are no pictures in {folder}{advice}")


def as_picture(thing: Any) -> Picture:
    """A path, bytes of a file, a PIL picture, or an array (height, width[, 1, 3 or 4]) of bytes or of floats in 0…1."""
    if isinstance(thing, str | Path):
        return Path(thing)
    if isinstance(thing, bytes | Image.Image):
        return thing
    if isinstance(thing, Tensor):
        thing = thing.detach().cpu().numpy()
    if isinstance(thing, np.ndarray):
        return _from_array(thing)
    raise UserError(f"a {type(thing).__name__} is not a picture; give a path, bytes, a PIL image or an array")


def _from_array(array: np.ndarray) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or not array.size:
        raise UserError(f"an array of shape {tuple(array.shape)} is not a picture; give (height, width[, 3 or 4])")
    if array.dtype == np.uint8:
        return Image.fromarray(array)
    if not np.issubdtype(array.dtype, np.floating):
        raise UserError(f"an array of {array.dtype} is not a picture; give bytes (uint8), or floats between 0 and 1")
    if not bool(((array >= 0) & (array <= 1)).all()):
        raise UserError("an array of floats must lie between 0 and 1 to be a picture; divide by 255, or give uint8")
    return Image.fromarray((array * 255).round().astype(np.uint8))

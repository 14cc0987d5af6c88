"""Folders of pictures: sorting pictures into class folders, and watching for new ones.

Pictures are sorted by link or copy; nothing is ever moved or overwritten.
"""

import filecmp
import os
import re
import shutil
import time
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Literal

from clipcil.classifier.predict import Prediction
from clipcil.data.sources import list_files
from clipcil.errors import UserError
from clipcil.storage import refuse_links, whole_file

UNKNOWN = "_none of these"
"""The folder of unknown pictures; class folders never begin with an underscore."""


class Sorter:
    """Puts pictures into `root`/class/. Running it again over the same pictures changes nothing."""

    def __init__(self, root: Path, by: Literal["link", "copy"], classes: Sequence[str] = ()) -> None:
        """`classes`: those of the model, so that each has a folder of its own."""
        if root.exists() and not root.is_dir():
            raise UserError(f"{root} is a file; name a folder to sort the pictures into")
        self.root, self.by, self._folders = root, by, folder_names(classes)

    def put(self, picture: Path, prediction: Prediction) -> Path | None:
        """The picture's place in the sorted folder; None for a picture that cannot be read."""
        if prediction.error is not None:
            return None
        best = prediction.names[0]
        folder = self.root / (UNKNOWN if prediction.unknown else self._folders.get(best) or folder_name(best))
        refuse_links(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            place, number = folder / picture.name, 1
            while os.path.lexists(place) and not self._is(place, picture):
                number += 1
                place = folder / f"{picture.stem}-{number}{picture.suffix}"
            if os.path.lexists(place):
                return place
            if self.by == "link":
                place.symlink_to(picture.resolve())
            else:
                with whole_file(place) as part:
                    shutil.copy2(picture, part)
            return place
        except OSError as error:
            raise UserError(f"cannot sort {picture} into {folder}: {error.strerror or error}") from error

    def _is(self, place: Path, picture: Path) -> bool:
        """Whether `place` already is this picture, from a run before."""
        if place.is_symlink():
            return place.resolve() == picture.resolve()
        return place.is_file() and self.by == "copy" and filecmp.cmp(place, picture, shallow=False)


def folder_names(classes: Sequence[str]) -> dict[str, str]:
    """A folder for each class. Names such as `a/b` and `a-b` would share one; the later gets a number.

    >>> folder_names(["a-b", "a/b"])
    {'a-b': 'a-b', 'a/b': 'a-b (2)'}
    """
    found: dict[str, str] = {}
    taken: set[str] = set()  # some file systems are not case-sensitive
    for name in classes:
        base, number = folder_name(name), 1
        found[name] = base
        while found[name].casefold() in taken:
            number += 1
            found[name] = f"{base} ({number})"
        taken.add(found[name].casefold())
    return found


def folder_name(name: str) -> str:
    """A class name as a folder's: no separators, no control characters, nothing hidden and not '..'."""
    text = unicodedata.normalize("NFC", name)
    text = re.sub(r'[\x00-\x1f<>:"/\\|?*]', "-", text).strip(" .")
    return text.lstrip("_").encode()[:200].decode(errors="ignore") or "class"


def watch(folders: list[Path], pause: float = 1.0) -> Iterator[list[Path]]:
    """Yield the pictures that are new in the folders, for ever, those that are there at the start first.

    A file counts as new when its size and time of change are the same in two looks, `pause` seconds apart, so that a
    picture still being copied is left for later; a file that is changed afterwards is new again.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; --watch watches folders")
    done: dict[Path, tuple[int, int]] = {}
    last: dict[Path, tuple[int, int]] = {}
    while True:
        now = {}
        for path in chain.from_iterable(map(list_files, folders)):
            with suppress(OSError):  # gone again
                status = path.stat()
                now[path] = status.st_size, status.st_mtime_ns
        ready = [path for path, mark in now.items() if done.get(path) != mark and last.get(path) == mark]
        done.update((path, now[path]) for path in ready)
        last = now
        if ready:
            yield ready
        time.sleep(pause)

"""Pictures that wait to be taught, in a private folder. Nothing that a client sends becomes part of a file name."""

import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from clipcil.classifier.state import KnownClass
from clipcil.data.names import check_names, clean_name, same_name, shorten
from clipcil.data.pictures import decode, thumbnail
from clipcil.errors import UserError, printable
from clipcil.serve.answers import Limits
from clipcil.storage import cache_folder

THUMBNAIL = 160
"""Longest side of a thumbnail in pixels."""


@dataclass(frozen=True)
class StagedPicture:
    """A picture that waits for its lesson, or a note about one that cannot be read."""

    id: str
    name: str
    """Its class."""
    title: str
    """The client's name of the file: text for people, never a path."""
    file: Path
    bytes: int
    digest: str
    broken: str | None = None
    """Why it cannot be read. A broken picture is not taught, and nothing of it is kept."""

    @property
    def thumbnail(self) -> Path:
        """The file of its thumbnail."""
        return self.file.with_suffix(".jpg")

    @cached_property
    def key(self) -> str:
        """The same for all spellings of its class."""
        return same_name(self.name)


class Staging:
    """The waiting pictures of all classes, in a private folder."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder, self._limits = folder, limits
        self._items: dict[str, StagedPicture] = {}
        self._lock = threading.Lock()
        self.revision = 0
        """Number of changes since the start."""

    def add(self, name: str, title: str, content: bytes) -> StagedPicture:
        """Store a picture with its thumbnail; return its entry, or that of the same picture in the same class.

        A `UserError` is raised where the name cannot name a class or too many pictures wait already.
        """
        name, id, digest = clean_name(name), secrets.token_hex(12), hashlib.sha256(content).hexdigest()
        check_names("the waiting pictures", [name])
        title = shorten(printable(clean_name(title.replace("\\", "/").rsplit("/", 1)[-1])), 80)
        item = StagedPicture(id, name, title, self.folder / f"{id}.picture", len(content), digest)
        try:
            self._limits.check(content)
            small = thumbnail(decode(content, "this file"), THUMBNAIL)
        except UserError as error:
            item, small = replace(item, bytes=0, broken=str(error)), b""
        with self._lock:
            for other in self._items.values():
                if other.digest == digest and other.key == item.key:
                    return other
            if len(self._items) >= self._limits.waiting_pictures:
                raise UserError(f"{len(self._items)} pictures are waiting already; teach them first")
            if sum(other.bytes for other in self._items.values()) + item.bytes > self._limits.waiting_bytes:
                raise UserError("the pictures that wait use all the space they may have; teach them first")
            if item.broken is None:
                try:
                    item.thumbnail.write_bytes(small)
                    item.file.write_bytes(content)
                except OSError:
                    discard([item])
                    raise
            self._items[id] = item
            self.revision += 1
        return item

    def find(self, id: str) -> StagedPicture | None:
        """The entry of a picture."""
        return self._items.get(id)

    def remove(self, id: str | None = None, name: str | None = None) -> bool:
        """Remove the picture `id`, or all pictures of the class `name`, with their files; whether there were any."""
        with self._lock:
            key = same_name(name) if name else None
            removed = [item for item in self._items.values() if item.id == id or item.key == key]
            for item in removed:
                del self._items[item.id]
            self.revision += bool(removed)
        discard(removed)
        return bool(removed)

    def follow(self, before: Sequence[KnownClass], after: Sequence[KnownClass]) -> None:
        """Rename the classes of waiting pictures where a change of the model only renamed its classes."""
        if [each.text for each in before] == [each.text for each in after]:
            names = {same_name(old.name): new.name for old, new in zip(before, after, strict=True)}
            with self._lock:
                for id, item in self._items.items():
                    self._items[id] = replace(item, name=names.get(item.key, item.name))
                self.revision += 1

    def take(self) -> list[StagedPicture]:
        """Take all pictures out of the list, broken ones too, to `put_back` or `discard`; none if all are broken."""
        with self._lock:
            taken = list(self._items.values())
            if all(item.broken for item in taken):
                return []
            self._items = {}
            self.revision += 1
        return taken

    def put_back(self, taken: list[StagedPicture]) -> None:
        """Let pictures wait again, before those that came in the meantime."""
        with self._lock:
            self._items = {item.id: item for item in taken} | self._items
            self.revision += 1

    def classes(self) -> dict[str, list[StagedPicture]]:
        """The pictures of each class, in the order in which they came."""
        with self._lock:
            return by_class(self._items.values())


def discard(taken: Iterable[StagedPicture]) -> None:
    """Delete the files of pictures."""
    for item in taken:
        item.file.unlink(missing_ok=True)
        item.thumbnail.unlink(missing_ok=True)


def by_class(pictures: Iterable[StagedPicture]) -> dict[str, list[StagedPicture]]:
    """Pictures by class, under the first spelling of its name."""
    found: dict[str, list[StagedPicture]] = {}
    for each in pictures:
        found.setdefault(each.key, []).append(each)
    return {same[0].name: same for same in found.values()}


@contextmanager
def open_staging(model: Path, limits: Limits) -> Iterator[Staging]:
    """A staging folder in the user's cache, deleted at the end. The caller holds the lock of the folder `model`."""
    folder = cache_folder() / "serve" / hashlib.sha256(os.fsencode(model.resolve())).hexdigest()[:16]
    shutil.rmtree(folder, ignore_errors=True)  # what a killed server left: only one has the model at a time
    folder.mkdir(mode=0o700, parents=True)
    try:
        yield Staging(folder, limits)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

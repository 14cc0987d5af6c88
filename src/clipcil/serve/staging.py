"""Pictures that wait to be taught: in a private folder under names made here, deleted after their lesson.

Nothing that a client sends becomes part of a file name.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from clipcil.data.names import LONGEST, clean_name, same_name, shorten
from clipcil.data.pictures import decode, thumbnail
from clipcil.errors import UserError
from clipcil.serve.guard import Limits
from clipcil.storage import cache_folder

THUMBNAIL = 160
"""Longest side of a thumbnail in pixels."""


@dataclass(frozen=True)
class Waiting:
    """A picture that waits for its lesson, or a note about one that cannot be read."""

    id: str
    name: str
    """Its class."""
    title: str
    """The client's name of the file: text for people, never a path."""
    broken: str | None = None
    """Why it cannot be read. A broken picture is not taught, and nothing of it is kept."""
    bytes: int = 0
    digest: str = ""

    @cached_property
    def key(self) -> str:
        """Equal for names that mean the same class."""
        return same_name(self.name)


@dataclass
class Staging:
    """The waiting pictures of all classes."""

    folder: Path
    limits: Limits
    _items: dict[str, Waiting] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, title: str, content: bytes) -> Waiting:
        """Check a picture, store it with its thumbnail and return its entry.

        A picture that waits in the same class already is not stored again; its entry is returned.

        Raises:
            UserError: The name cannot name a class, or too many pictures wait already.
        """
        title = shorten(clean_name(title.replace("\\", "/").rsplit("/", 1)[-1]), 80)
        item = Waiting(secrets.token_hex(12), class_name(name), title, self.limits.refusal(content))
        kept = None
        try:
            if item.broken is None:
                try:
                    small = thumbnail(decode(content, "this file"), THUMBNAIL)
                except UserError as error:
                    item = replace(item, broken=str(error))
                else:
                    item = replace(item, bytes=len(content), digest=hashlib.sha256(content).hexdigest())
                    self.thumbnail(item.id).write_bytes(small)
                    self.file(item.id).write_bytes(content)
            with self._lock:
                kept = self._admit(item)
        finally:
            if kept is not item:
                self.discard([item])
        return kept

    def _admit(self, item: Waiting) -> Waiting:
        """Enter `item` into the list, unless the same picture waits in the same class already."""
        waiting = list(self._items.values())
        for other in waiting:
            if item.digest and other.digest == item.digest and other.key == item.key:
                return other
        keys = {other.key for other in waiting}
        if len(waiting) >= self.limits.waiting_pictures:
            raise UserError(f"{len(waiting)} pictures are waiting already; teach them first")
        if sum(other.bytes for other in waiting) + item.bytes > self.limits.waiting_bytes:
            raise UserError("the waiting pictures use all the space there is for them; teach them first")
        if item.key not in keys and len(keys) >= self.limits.waiting_classes:
            raise UserError(f"pictures of {len(keys)} classes are waiting already; teach them first")
        self._items[item.id] = item
        return item

    def file(self, id: str) -> Path:
        """The file of a picture."""
        return self.folder / f"{id}.picture"

    def thumbnail(self, id: str) -> Path:
        """The file of a picture's thumbnail."""
        return self.folder / f"{id}.jpg"

    def find(self, id: str) -> Waiting | None:
        """The entry of a picture."""
        with self._lock:
            return self._items.get(id)

    def remove(self, id: str | None = None, name: str | None = None) -> None:
        """Remove the picture `id`, or all pictures of the class `name`, and delete the files."""
        key = None if name is None else same_name(clean_name(name))
        with self._lock:
            removed = [item for item in self._items.values() if item.id == id or item.key == key]
            for item in removed:
                del self._items[item.id]
        self.discard(removed)

    def rename_class(self, old: str, new: str) -> None:
        """Put the pictures that wait for the class `old` into the class `new`."""
        key, new = same_name(clean_name(old)), class_name(new)
        with self._lock:
            for id, item in self._items.items():
                if item.key == key:
                    self._items[id] = replace(item, name=new)

    def take(self) -> list[Waiting]:
        """Take all pictures out of the list, broken ones too; nothing if all are broken.

        The caller hands them to `put_back` or `discard` afterwards.
        """
        with self._lock:
            taken = list(self._items.values())
            if all(item.broken for item in taken):
                return []
            self._items = {}
        return taken

    def put_back(self, taken: list[Waiting]) -> None:
        """Let pictures wait again, before those that came in the meantime."""
        with self._lock:
            self._items = {item.id: item for item in taken} | self._items

    def discard(self, taken: list[Waiting]) -> None:
        """Delete the files of pictures that are in the list no longer."""
        for item in taken:
            self.file(item.id).unlink(missing_ok=True)
            self.thumbnail(item.id).unlink(missing_ok=True)

    def classes(self) -> dict[str, list[Waiting]]:
        """The pictures of each class, in the order in which they came."""
        with self._lock:
            return by_class(self._items.values())


def by_class(items: Iterable[Waiting]) -> dict[str, list[Waiting]]:
    """Pictures by class, under the first spelling of its name."""
    found: dict[str, list[Waiting]] = {}
    spelling: dict[str, str] = {}
    for item in items:
        found.setdefault(spelling.setdefault(item.key, item.name), []).append(item)
    return found


@contextmanager
def open_staging(model: Path, limits: Limits) -> Iterator[Staging]:
    """A staging folder in the user's cache, deleted at the end. The caller holds the lock of the folder `model`.

    Only one server has a model at a time, so the folder is named by the model's path, and a folder that is there
    already was left by a killed server.
    """
    name = hashlib.sha256(str(model.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    folder = cache_folder() / "serve" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    try:
        yield Staging(folder, limits)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def class_name(raw: str) -> str:
    """A class name as the model stores it.

    Raises:
        UserError: The name is empty, invisible or too long.
    """
    name = clean_name(raw)
    if not same_name(name):
        raise UserError("a class needs a name; write one")
    if len(name) > LONGEST:
        raise UserError(f"the name '{shorten(name)}' is too long; use at most {LONGEST} characters")
    return name

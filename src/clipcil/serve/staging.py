"""Pictures that wait to be taught: in a private folder under names made here, deleted after their lesson.

The folder is in the user's cache and is locked for as long as its server runs, so that the next server finds and
deletes what a killed one left behind. Nothing that a client sends becomes part of a file name.
"""

from __future__ import annotations

import hashlib
import io
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image

from clipcil.data.names import LONGEST, clean_name, same_name, shorten
from clipcil.data.pictures import decode, readable_formats
from clipcil.errors import UserError
from clipcil.files import cache_folder, run_lock
from clipcil.serve.limits import Limits

THUMBNAIL = 160
"""Longest side of a thumbnail in pixels."""


@dataclass(frozen=True)
class Waiting:
    """One picture that waits for its lesson, or one that cannot be read."""

    id: str
    name: str
    """Its class."""
    title: str
    """What the client called the file; text for people, never a path."""
    broken: str | None = None
    """Why it cannot be read; it is not taught then and nothing of it is kept."""
    bytes: int = 0
    digest: str = ""

    @cached_property
    def key(self) -> str:
        """Equal for names that mean one class."""
        return same_name(self.name)

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "title": self.title, "broken": self.broken}


@dataclass
class Staging:
    """The pictures of all classes that wait."""

    folder: Path
    limits: Limits
    _items: dict[str, Waiting] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, title: str, content: bytes) -> Waiting:
        """Check a picture, store it with its thumbnail and return its entry.

        Raises:
            UserError: The name cannot be the name of a class, or too much is waiting already.
        """
        name, digest = class_name(name), hashlib.sha256(content).hexdigest()
        with self._lock:
            if (known := self._admit(name, digest, len(content))) is not None:
                return known
        item = Waiting(secrets.token_hex(12), name, _title(title), None, len(content), digest)
        try:
            image: Image.Image | None = decode_bounded(content, self.limits.pixels)
        except UserError as error:
            item = Waiting(item.id, name, item.title, str(error))
            image = None
        kept = None
        try:
            if image is not None:
                self.thumbnail(item.id).write_bytes(jpeg(image, THUMBNAIL))
                self.file(item.id).write_bytes(content)
            with self._lock:  # others may have come while this one was decoded
                kept = self._admit(name, digest, len(content)) or self._items.setdefault(item.id, item)
        finally:
            if kept is not item:
                self._delete(item)
        return kept

    def _admit(self, name: str, digest: str, size: int) -> Waiting | None:
        """The entry of the same picture in the same class, if it waits already; refuses what would be too much."""
        key = same_name(name)
        self._refuse_too_much(key, size)
        for item in self._items.values():
            if item.digest == digest and item.key == key:
                return item
        return None

    def _refuse_too_much(self, key: str, size: int) -> None:
        if len(self._items) >= self.limits.waiting_pictures:
            raise UserError(f"{len(self._items)} pictures are waiting already; teach them first")
        if sum(item.bytes for item in self._items.values()) + size > self.limits.waiting_bytes:
            raise UserError("the waiting pictures use all the space there is for them; teach them first")
        names = {item.key for item in self._items.values()}
        if key not in names and len(names) >= self.limits.waiting_classes:
            raise UserError(f"pictures of {len(names)} classes are waiting already; teach them first")

    def file(self, id: str) -> Path:
        return self.folder / f"{id}.picture"

    def thumbnail(self, id: str) -> Path:
        return self.folder / f"{id}.jpg"

    def find(self, id: str) -> Waiting | None:
        with self._lock:
            return self._items.get(id)

    def remove(self, *ids: str) -> None:
        """Take pictures out and delete their files."""
        for id in ids:
            with self._lock:
                item = self._items.pop(id, None)
            if item is not None:
                self._delete(item)

    def remove_class(self, name: str) -> None:
        key = same_name(clean_name(name))
        with self._lock:
            ids = [item.id for item in self._items.values() if item.key == key]
        self.remove(*ids)

    def rename_class(self, old: str, new: str) -> None:
        """Put the pictures that wait for `old` with the class `new`."""
        key, new = same_name(clean_name(old)), class_name(new)
        with self._lock:
            for id, item in self._items.items():
                if item.key == key:
                    self._items[id] = replace(item, name=new)

    def take(self) -> list[Waiting]:
        """All that waits, the broken ones too, out of the list; `put_back` or `discard` them. None if none is whole."""
        with self._lock:
            taken = list(self._items.values())
            if all(item.broken for item in taken):
                return []
            self._items = {}
        return taken

    def put_back(self, taken: list[Waiting]) -> None:
        with self._lock:
            self._items = {item.id: item for item in taken} | self._items

    def discard(self, taken: list[Waiting]) -> None:
        for item in taken:
            self._delete(item)

    def classes(self) -> dict[str, list[Waiting]]:
        """The pictures of each class, in the order in which they came."""
        found: dict[str, list[Waiting]] = {}
        spelt: dict[str, str] = {}
        with self._lock:
            for item in self._items.values():
                found.setdefault(spelt.setdefault(item.key, item.name), []).append(item)
        return found

    def _delete(self, item: Waiting) -> None:
        for path in (self.file(item.id), self.thumbnail(item.id)):
            path.unlink(missing_ok=True)


@contextmanager
def open_staging(limits: Limits) -> Iterator[Staging]:
    """A staging folder for one server; it is deleted at the end, as are those of servers that were killed."""
    root = cache_folder() / "serve"
    root.mkdir(parents=True, exist_ok=True)
    for old in root.iterdir():
        with suppress(UserError, OSError):  # a locked folder belongs to a server that is running
            # Under a name with a dot it is not held yet; what a server killed just then left there is empty.
            if not old.name.startswith(".") or old.lstat().st_mtime < time.time() - 3600:
                with run_lock(old):
                    shutil.rmtree(old, ignore_errors=True)
    folder = root / secrets.token_hex(8)
    new = folder.with_name(f".{folder.name}")
    new.mkdir(mode=0o700)
    with run_lock(new):
        new.rename(folder)
        try:
            yield Staging(folder, limits)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def class_name(raw: str) -> str:
    """A name as the model will have it.

    Raises:
        UserError: It is empty, of invisible letters alone, or too long.
    """
    name = clean_name(raw)
    if not same_name(name):
        raise UserError("a class needs a name; write one")
    if len(name) > LONGEST:
        raise UserError(f"the name '{shorten(name)}' is too long; use at most {LONGEST} characters")
    return name


def decode_bounded(content: bytes, pixels: int) -> Image.Image:
    """Decode a picture after a look at the size that its header claims.

    Raises:
        UserError: It has too many pixels or cannot be decoded.
    """
    refuse_huge(content, pixels)
    return decode(content, "this file")


def refuse_huge(content: bytes, pixels: int) -> None:
    """Raise a UserError for a picture whose header claims more than `pixels` pixels; nothing is decoded."""
    try:
        with Image.open(io.BytesIO(content), formats=readable_formats()) as image:
            width, height = image.size
    except Exception:  # a damaged header can raise anything; decoding reports it
        return
    if width * height > pixels:
        raise UserError(f"{width}×{height} pixels are too many; at most {pixels // 10**6} million are taken")


def jpeg(image: Image.Image, side: int) -> bytes:
    """A small copy of a picture, its longest side `side` pixels."""
    small = image.copy()
    small.thumbnail((side, side))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=80)
    return out.getvalue()


def _title(raw: str) -> str:
    return shorten(clean_name(raw.replace("\\", "/").rsplit("/", 1)[-1]), 80)

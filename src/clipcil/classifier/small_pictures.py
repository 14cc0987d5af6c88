"""A few small pictures of each class, kept in the folder of the model if that is switched on; off by default."""

import base64
import hashlib
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from clipcil.classifier.folder import PREVIOUS, read_model
from clipcil.classifier.state import KnownClass
from clipcil.data.names import same_name
from clipcil.errors import UserError
from clipcil.storage import read_json, refuse_links, sweep, write_json

MOST_SMALL_PICTURES = 6
"""Small pictures kept of one class."""
LARGEST_FILE = 2**20
"""Maximum bytes of the file of a class; six small pictures take less than a tenth of it."""
_OWN = re.compile(r"[0-9a-f]{24}\.json")


class SmallPictures:
    """One file for each class, named by a hash of the class's name. The folder is there while the switch is on."""

    def __init__(self, model: Path) -> None:
        self.model, self.folder = model, model / "small-pictures"
        self._lock = threading.Lock()  # a lesson may add some while they are being switched off

    @property
    def on(self) -> bool:
        """Whether small pictures are kept."""
        return self.folder.is_dir() and not self.folder.is_symlink()

    def switch(self, on: bool) -> None:
        """Start keeping small pictures, or stop and delete all of them."""
        refuse_links(self.folder)
        try:
            with self._lock:
                if on:
                    self.folder.mkdir(parents=True, exist_ok=True)
                elif self.on:
                    self._keep_only([])
                    sweep(self.folder)
                    if any(self.folder.iterdir()):
                        raise UserError(f"{self.folder} holds files that clipcil did not write; move them away")
                    self.folder.rmdir()
        except OSError as error:
            raise UserError(f"cannot write {self.folder}: {error.strerror or error}") from error

    def of(self, name: str) -> list[bytes]:
        """The pictures of a class as JPEG files; a file that is damaged shows none."""
        return _read(self._file(name))

    def add(self, name: str, pictures: Sequence[bytes]) -> None:
        """Keep some of these in place of the oldest; none if the switch was turned off in the meantime."""
        with self._lock:
            if self.on:
                kept = [*self.of(name), *pictures][-MOST_SMALL_PICTURES:]
                write_json(self._file(name), [base64.b64encode(picture).decode() for picture in kept])

    @property
    def count(self) -> int:
        """How many there are, of all classes."""
        return sum(len(_read(path)) for path in self._files())

    def follow(self, before: Sequence[KnownClass]) -> None:
        """Rename and delete pictures as the classes of the model were; those of the model kept for undo stay.

        Args:
            before: The classes of the model before the change.
        """
        if not self.on:
            return
        after = read_model(self.model).known
        kept = [*after]
        with suppress(UserError):  # where none is kept; a damaged one cannot be brought back
            kept += read_model(self.model, PREVIOUS).known
        with self._lock:
            if [each.text for each in before] == [each.text for each in after]:
                for old, new in zip(before, after, strict=True):
                    if old.name != new.name and self._file(old.name).is_file():
                        self._file(old.name).replace(self._file(new.name))
            self._keep_only(kept)

    def _keep_only(self, classes: Sequence[KnownClass]) -> None:
        """Delete the pictures of every other class."""
        for path in set(self._files()) - {self._file(each.name) for each in classes}:
            path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        """The files of all classes, without other files, and none if the folder is a link."""
        return [path for path in self.folder.iterdir() if _OWN.fullmatch(path.name)] if self.on else []

    def _file(self, name: str) -> Path:
        return self.folder / f"{hashlib.sha256(same_name(name).encode()).hexdigest()[:24]}.json"


def _read(path: Path) -> list[bytes]:
    try:
        return [base64.b64decode(text) for text in read_json(path, LARGEST_FILE)][:MOST_SMALL_PICTURES]
    except (UserError, ValueError, TypeError):
        return []

"""The official folder or archive of a dataset: find it and check its counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clipcil.data.archives import find_archive, is_archive, unpack
from clipcil.errors import UserError


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
        if is_archive(root):
            return self._home(unpack(root))
        home = self._home(root)
        if home is None and self.archive and (archive := find_archive(root, self.archive)):
            home = self._home(unpack(archive))
        return home

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
        folders = (path.parent for path in (*sorted(root.glob(self.mark)), *sorted(root.glob(f"*/{self.mark}"))))
        return next(folders, None)

"""Pictures that were taught already, recognised by a checksum of their bytes."""

from __future__ import annotations

import hashlib
import stat
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipcil.data.dataset import Dataset
from clipcil.data.pictures import Picture, contents
from clipcil.errors import UserError

LABELS, CHECKSUMS = "taught.labels", "taught.checksums"
"""What these tensors are called among the weights of a model."""


def checksum(picture: Picture) -> int:
    """64 bits of a checksum of a file's bytes, or of the pixels of a picture in memory.

    A file that cannot be read gets a unique number: decoding it reports the error.
    """
    digest = _digest()
    if isinstance(picture, bytes):
        digest.update(picture)
    elif isinstance(picture, Path):
        try:
            if not stat.S_ISREG(picture.stat().st_mode):
                raise OSError("not a file")
            with picture.open("rb") as file:
                digest = hashlib.file_digest(file, _digest)
        except OSError:
            digest.update(uuid.uuid4().bytes)
    else:
        digest.update(contents(picture))
    return int.from_bytes(digest.digest(), "little", signed=True)


def _digest() -> Any:
    return hashlib.blake2b(digest_size=8)


@dataclass
class Repeats:
    """Pictures of a lesson that were taught before."""

    same: list[str] = field(default_factory=list)
    """Left out: taught before as the same class, or twice in this lesson."""
    elsewhere: list[str] = field(default_factory=list)
    """Pictures that are learnt, but were taught before as another class: a line for each two classes."""


@dataclass
class TaughtPictures:
    """The class and the checksum of every picture the model was taught."""

    labels: Tensor
    """(N,) int64."""
    checksums: Tensor
    """(N,) int64."""

    @classmethod
    def empty(cls) -> TaughtPictures:
        return cls(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))

    def with_pictures(self, labels: Tensor, checksums: Tensor) -> TaughtPictures:
        return TaughtPictures(torch.cat([self.labels, labels]), torch.cat([self.checksums, checksums]))

    def without(self, index: int) -> TaughtPictures:
        """Without class `index`; the labels of the classes after it move down by one."""
        keep = self.labels != index
        labels = self.labels[keep]
        return TaughtPictures(labels - (labels > index).long(), self.checksums[keep])

    def find_repeats(self, dataset: Dataset, labels: Tensor, names: list[str]) -> tuple[Tensor, Tensor, Repeats]:
        """Which training pictures of a dataset are new.

        Args:
            dataset: The pictures of a lesson.
            labels: (N,) the class of each of its training pictures, as the model counts them.
            names: What these classes are called.

        Returns:
            The rows to learn, the checksums of those rows, and what was found.
        """
        places: dict[int, set[int]] = {}
        for label, number in zip(self.labels.tolist(), self.checksums.tolist(), strict=True):
            places.setdefault(number, set()).add(label)
        rows, numbers, found, pictures = [], [], Repeats(), dataset.train
        twofold: dict[tuple[int, int], list[str]] = {}  # pictures of (the class now, the class before)
        for row, label in enumerate(labels.tolist()):
            number = checksum(pictures.pictures[int(pictures.rows[row])])
            before = places.setdefault(number, set())
            if label in before:
                found.same.append(pictures.describe(row))
                continue
            if before:
                twofold.setdefault((label, next(iter(before))), []).append(pictures.describe(row))
            before.add(label)
            rows.append(row)
            numbers.append(number)
        for (now, then), same in twofold.items():
            which = f"{same[0]} is" if len(same) == 1 else f"{len(same)} pictures ({same[0]}, …) are"
            found.elsewhere.append(f"{which} taught as '{names[now]}' and as '{names[then]}'")
        return torch.tensor(rows, dtype=torch.int64), torch.tensor(numbers, dtype=torch.int64), found

    def tensors(self) -> dict[str, Tensor]:
        return {LABELS: self.labels, CHECKSUMS: self.checksums}

    @classmethod
    def take(cls, tensors: dict[str, Tensor], classes: int) -> TaughtPictures:
        """Take them out of the weights of a model, checked; none for a model of version 0.1."""
        nothing = cls.empty()
        labels, numbers = tensors.pop(LABELS, nothing.labels), tensors.pop(CHECKSUMS, nothing.checksums)
        fits = labels.ndim == 1 and labels.shape == numbers.shape and labels.dtype == numbers.dtype == torch.int64
        if not fits or (len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes):
            raise UserError("the checksums of the model's pictures are damaged; restore the folder from a copy")
        return cls(labels, numbers)

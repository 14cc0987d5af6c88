"""Rows of one class after another: a memory with the sizes of its state, and features with one byte per number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

LARGEST = 127
"""The largest code of a number: int8 without −128, so that codes are symmetric."""


class SizedByState(nn.Module):
    """An empty memory can load the state of any other: its buffers get the shapes that the state has."""

    rows_of: ClassVar[dict[str, str]] = {}
    """Buffers whose rows are sorted by class, and the buffer with the number of rows of each class."""
    alike: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Buffers that have as many rows as each other, such as one for each class."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, value in list(self.named_buffers(recurse=False)):
            found = state_dict.get(prefix + name)
            if found is not None and found.ndim == value.ndim:  # another number of dimensions is reported by loading
                setattr(self, name, value.new_empty(found.shape))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.check_state()

    def check_state(self) -> None:
        """Raise ValueError unless the buffers fit each other: a file may say anything."""
        for rows, counts in self.rows_of.items():
            check_rows(getattr(self, rows), getattr(self, counts))
        for group in self.alike:
            lengths = {name: len(getattr(self, name)) for name in group}
            if len(set(lengths.values())) > 1:
                raise ValueError(f"buffers of different lengths: {lengths}")


def check_rows(rows: Tensor, counts: Tensor) -> None:
    """Raise ValueError unless rows (R, …) are those of classes with `counts` (C,) rows: a file may say anything."""
    if counts.ndim != 1 or rows.ndim != 2 or bool((counts < 0).any()) or int(counts.sum()) != len(rows):
        raise ValueError(f"rows {tuple(rows.shape)} for classes of {counts.tolist()[:10]} rows")


class FeatureRows(SizedByState):
    """Up to `limit` features of each class, every one a few unit vectors of `sizes` numbers side by side.

    A vector is kept as int8 codes and the length of one step: x ≈ step · code, step = max|x|/127. A class with more
    than `limit` pictures keeps those whose codes have the lowest hashes, which is a uniform sample that does not depend
    on the order of arrival. So the memory is a function of the set of pictures alone: learning them in two lessons
    leaves the same bits as learning them at once, and a class that is removed leaves no trace.
    """

    rows_of: ClassVar = {"codes": "counts", "steps": "counts"}
    codes: Tensor  # (R, D) int8, class after class, in the order of their hashes within a class
    steps: Tensor  # (R, number of vectors) float32
    counts: Tensor  # (C,) int64: rows of each class

    def __init__(self, sizes: Sequence[int], limit: int) -> None:
        super().__init__()
        self.sizes, self.limit = list(sizes), limit
        self.register_buffer("codes", torch.zeros(0, sum(sizes), dtype=torch.int8))
        self.register_buffer("steps", torch.zeros(0, len(sizes)))
        self.register_buffer("counts", torch.zeros(0, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def labels(self) -> Tensor:
        """(R,) int64: the class of each row."""
        return torch.arange(len(self.counts), device=self.codes.device).repeat_interleave(self.counts)

    def check_state(self) -> None:
        super().check_state()
        if (self.codes.shape[1], self.steps.shape[1]) != (sum(self.sizes), len(self.sizes)):
            raise ValueError(
                f"features of {self.codes.shape[1]} numbers, {self.steps.shape[1]} vectors: not {self.sizes}"
            )

    def unit(self, features: Tensor) -> Tensor:
        """(N, D) → (N, D): each of the vectors side by side brought to unit length."""
        return torch.cat([normalize(part, dim=1) for part in torch.split(features, self.sizes, dim=1)], dim=1)

    def rows(self) -> Tensor:
        """(R, D) float32: what is kept, as numbers."""
        return self.codes.float() * self.steps.repeat_interleave(torch.tensor(self.sizes).to(self.codes.device), dim=1)

    @torch.no_grad()
    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add pictures of new or known classes.

        Args:
            features: (N, D), not normalised.
            labels: (N,); a label past the last class is a new class, and new classes come without gaps.
        """
        codes, steps = self.encode(features)
        self._keep(
            torch.cat([self.codes, codes.to(self.codes)]),
            torch.cat([self.steps, steps.to(self.steps)]),
            torch.cat([self.labels, labels.to(self.counts.device)]),
            max(len(self.counts), int(labels.max()) + 1),
        )

    def encode(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (N, D) and steps (N, number of vectors) of features (N, D), not normalised."""
        parts = torch.split(self.unit(features.float()), self.sizes, dim=1)
        steps = torch.stack([part.abs().amax(1) / LARGEST for part in parts], dim=1)
        codes = [(part / step.clamp(min=1e-30)[:, None]).round() for part, step in zip(parts, steps.T, strict=True)]
        return torch.cat(codes, dim=1).to(torch.int8), steps

    def find(self, features: Tensor, labels: Tensor) -> Tensor:
        """Find pictures by their features (N, D) and classes (N,): the row of each, (N,), or −1 where none keeps it."""
        own = zip(self.labels.tolist(), self.codes.cpu().numpy(), strict=True)
        places = {(label, code.tobytes()): place for place, (label, code) in enumerate(own)}
        asked = zip(labels.tolist(), self.encode(features)[0].cpu().numpy(), strict=True)
        found = [places.get((label, code.tobytes()), -1) for label, code in asked]
        return torch.tensor(found, dtype=torch.int64, device=self.codes.device)

    @torch.no_grad()
    def remove(self, index: int) -> None:
        """Forget a class; the labels of the classes after it move down by one."""
        keep = self.labels != index
        self.codes, self.steps = self.codes[keep], self.steps[keep]
        self.counts = torch.cat([self.counts[:index], self.counts[index + 1 :]])

    def _keep(self, codes: Tensor, steps: Tensor, labels: Tensor, classes: int) -> None:
        hashes = torch.tensor([_hash(row.tobytes()) for row in codes.cpu().numpy()], device=codes.device)
        order = torch.arange(len(labels), device=codes.device)
        for key in (*steps.T, hashes, labels):  # copies of a picture may share their codes and differ in their steps
            order = order[key[order].argsort(stable=True)]
        counts = torch.bincount(labels, minlength=classes)
        place = torch.arange(len(labels), device=codes.device) - (counts.cumsum(0) - counts)[labels[order]]
        kept = order[place < self.limit]
        self.codes, self.steps, self.counts = codes[kept], steps[kept], counts.clamp(max=self.limit)


def _hash(row: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "little", signed=True)

"""Rows of one class after another: a memory with the sizes of its state, and features with one byte per number."""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

LARGEST_CODE = 127
"""The largest code of a number: int8 without −128, so that codes are symmetric."""


class SizedByState(nn.Module):
    """Buffers that take their sizes from the state that is loaded.

    Every buffer is annotated with its axes and its dtype, `Annotated[Tensor, "C d", torch.float64]`. Axes of one name
    have one length.

    Args:
        fixed: Lengths that every state must have; an axis that is not among them begins with length 0.
    """

    def __init__(self, **fixed: int) -> None:
        super().__init__()
        hints = get_type_hints(type(self), include_extras=True).items()
        self.layout = {name: hint.__metadata__ for name, hint in hints if get_origin(hint) is Annotated}
        self._fixed = fixed
        for name, (axes, dtype) in self.layout.items():
            self.register_buffer(name, torch.zeros([fixed.get(axis, 0) for axis in axes.split()], dtype=dtype))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, value in list(self.named_buffers(recurse=False)):
            found = state_dict.get(prefix + name)
            if found is not None and found.ndim == value.ndim:  # another number of axes is reported by loading
                setattr(self, name, value.new_empty(found.shape))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.check_state()

    def check_state(self) -> None:
        """Raise ValueError unless the buffers fit each other: a state may come from a stranger's file."""
        lengths = dict(self._fixed)
        for name, (axes, _) in self.layout.items():
            for axis, length in zip(axes.split(), getattr(self, name).shape, strict=True):
                if lengths.setdefault(axis, length) != length:
                    raise ValueError(f"'{name}' has length {length} along {axis}, not {lengths[axis]}")


def check_rows(rows: Tensor, counts: Tensor) -> None:
    """Raise ValueError unless `counts` (C,), the rows of each class, add up to the number of `rows` (R, …)."""
    if bool((counts < 0).any()) or int(counts.sum()) != len(rows):
        raise ValueError(f"{len(rows)} rows for classes of {counts.tolist()[:10]} rows")


def without(values: Tensor, index: int, count: int = 1) -> Tensor:
    """`values` (N, …) without `count` rows from row `index` on."""
    return torch.cat([values[:index], values[index + count :]])


class FeatureRows(SizedByState):
    """Up to `limit` features of each class, every one a few unit vectors of `sizes` numbers side by side.

    A vector is kept as int8 codes and the length of one step: x ≈ step · code, step = max|x|/127. A class with more
    than `limit` pictures keeps the pictures whose codes have the lowest hashes: a uniform sample that does not depend
    on the order of arrival. So the memory is a function of the set of pictures alone: learning them in two lessons
    leaves the same bits as learning them at once, and a class that is removed leaves no trace.
    """

    codes: Annotated[Tensor, "R D", torch.int8]  # class after class, in the order of their hashes within a class
    steps: Annotated[Tensor, "R V", torch.float32]  # V vectors
    counts: Annotated[Tensor, "C", torch.int64]  # rows of each class

    def __init__(self, sizes: Sequence[int], limit: int) -> None:
        super().__init__(D=sum(sizes), V=len(sizes))
        self.sizes, self.limit = list(sizes), limit

    def __len__(self) -> int:
        return len(self.codes)

    def check_state(self) -> None:
        super().check_state()
        check_rows(self.codes, self.counts)

    @property
    def labels(self) -> Tensor:
        """(R,) int64: the class of each row."""
        return torch.arange(len(self.counts), device=self.codes.device).repeat_interleave(self.counts)

    def rows(self) -> Tensor:
        """(R, D) float32: the stored features."""
        return self.codes.float() * self.steps.repeat_interleave(torch.tensor(self.sizes).to(self.codes.device), dim=1)

    def unit(self, features: Tensor) -> Tensor:
        """(N, D) → (N, D): each of the vectors side by side brought to unit length."""
        return torch.cat([normalize(part, dim=1) for part in torch.split(features, self.sizes, dim=1)], dim=1)

    def encode(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (N, D) and steps (N, V) of features (N, D), not normalised."""
        parts = torch.split(self.unit(features.float()), self.sizes, dim=1)
        steps = torch.stack([part.abs().amax(1) / LARGEST_CODE for part in parts], dim=1)
        codes = [(part / step.clamp(min=1e-30)[:, None]).round() for part, step in zip(parts, steps.T, strict=True)]
        return torch.cat(codes, dim=1).to(torch.int8), steps

    @torch.no_grad()
    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add pictures of new or known classes.

        Args:
            features: (N, D), not normalised.
            labels: (N,); a label past the last class is a new class, and new classes come without gaps.
        """
        codes, steps = self.encode(features)
        codes = torch.cat([self.codes, codes.to(self.codes)])
        steps = torch.cat([self.steps, steps.to(self.steps)])
        labels = torch.cat([self.labels, labels.to(self.counts.device)])
        digests = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in codes.cpu().numpy()]
        hashes = torch.tensor([int.from_bytes(each, "little", signed=True) for each in digests], device=codes.device)
        order = torch.arange(len(labels), device=codes.device)
        for key in (*steps.T, hashes, labels):  # copies of a picture may share their codes and differ in their steps
            order = order[key[order].argsort(stable=True)]
        counts = torch.bincount(labels, minlength=len(self.counts))
        place = torch.arange(len(labels), device=codes.device) - (counts.cumsum(0) - counts)[labels[order]]
        kept = order[place < self.limit]
        self.codes, self.steps, self.counts = codes[kept], steps[kept], counts.clamp(max=self.limit)

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
        self.counts = without(self.counts, index)

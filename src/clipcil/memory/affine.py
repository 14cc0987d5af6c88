"""Affine maps between feature spaces."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AffineMap(NamedTuple):
    """x ↦ matrix·x + offset, with matrix (d, d) and offset (d,)."""

    matrix: Tensor
    offset: Tensor

    def __call__(self, points: Tensor) -> Tensor:
        """Map `points` (..., d)."""
        return points @ self.matrix.T + self.offset

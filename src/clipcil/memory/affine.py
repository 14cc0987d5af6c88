"""Affine maps between feature spaces."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AffineMap(NamedTuple):
    """x ↦ matrix·x + offset, with matrix (d, d) and offset (d,)."""

    matrix: Tensor
    offset: Tensor

    def __call__(self, points: Tensor) -> Tensor:
        """Carry `points` (..., d)."""
        return points @ self.matrix.T + self.offset


def identity_map(dim: int) -> AffineMap:
    """x ↦ x."""
    return AffineMap(torch.eye(dim, dtype=torch.float64), torch.zeros(dim, dtype=torch.float64))


def compose(second: AffineMap, first: AffineMap) -> AffineMap:
    """second ∘ first: M = M₂M₁, c = M₂c₁ + c₂."""
    return AffineMap(second.matrix @ first.matrix, second.matrix @ first.offset + second.offset)

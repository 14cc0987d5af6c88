"""Semantic drift compensation (SDC, CVPR 2020, https://arxiv.org/abs/2004.00440).

Each stored mean moves by the weighted mean shift of the new pictures near it; covariances stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clipcil.memory.gaussians import GaussianMemory

WIDTH = 0.2
"""σ for features of unit length, as the authors' script sets it (yulu0724/SDC-IL, commit 4d9efc9, run_demo.sh)."""


def shifts(means: Tensor, before: Tensor, after: Tensor, width: float = WIDTH) -> Tensor:
    """(C, d): how far each mean moves.

        Δ_c = Σ_i w_i (y_i − x_i) / Σ_i w_i,    w_i = exp(−‖x_i − μ_c‖² / 2σ²)

    Args:
        means: (C, d) stored means in the space before.
        before: (n, d) features x of the new pictures by the tower before its change.
        after: (n, d) features y of the same pictures by the tower after its change.
        width: σ.

    Example:
        >>> import torch
        >>> shifts(torch.zeros(1, 2), torch.zeros(3, 2), torch.ones(3, 2))
        tensor([[1., 1.]])
    """
    weights = torch.softmax(-torch.cdist(means, before).square() / (2 * width**2), dim=1)
    return weights @ (after - before)


def calibrate(memory: GaussianMemory, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Move every stored mean."""
    memory.shift(shifts(memory.means(), torch.cat(list(before)).double(), torch.cat(list(after)).double()))

"""A linear map learnt from pairs: learnable drift compensation (LDC, ECCV 2024, https://arxiv.org/abs/2407.08536).

Every picture of the new task is encoded by the tower before and after its change, so the map can be learnt from pairs
of features, where Eq. (4) uses only their two Gaussians. LDC trains the map by gradient descent; a linear map has a
closed form, and its ridge parameter is chosen by exact leave-one-out on the pairs, so there is nothing to set.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clipcil.memory.affine import AffineMap
from clipcil.memory.gaussians import GaussianMemory

RIDGES = tuple(10.0**power for power in range(-6, 4))
"""Ridges to choose from, as shares of the average variance of the features before."""


def paired_map(before: Tensor, after: Tensor, ridges: Sequence[float] = RIDGES) -> AffineMap:
    """The affine map that best maps each feature to its counterpart, regularised towards a plain shift.

        T = I + E,    E = argmin ‖X Eᵀ − D‖² + r ‖E‖²,    D = Y − X,    b = ȳ − T x̄

    with X, Y centred and r = ridge · ‖X‖²/d. The leave-one-out residual of picture i is d_i/(1 − h_i), with d_i its
    residual in the fit and h_i = x_iᵀ (XᵀX + r I)⁻¹ x_i + 1/n; the ridge with the smallest such residuals is taken.

    Args:
        before: (n, d) features by the tower before its change.
        after: (n, d) features of the same pictures by the tower after its change.
        ridges: Ridges to choose from.

    Returns:
        The map, in float64. With one picture it is a shift.

    Example:
        >>> import torch
        >>> points = torch.randn(40, 3, dtype=torch.float64)
        >>> torch.allclose(paired_map(points, 2 * points + 1)(points), 2 * points + 1, atol=1e-4)
        True
    """
    before, after = before.double(), after.double()
    mean_from, mean_to = before.mean(0), after.mean(0)
    x = before - mean_from
    moved = after - mean_to - x
    values, basis = torch.linalg.eigh(x.T @ x)
    values, rotated = values.clamp(min=0), x @ basis
    level = values.mean().clamp(min=1e-30)
    image = rotated.T @ moved

    def missed(ridge: float) -> Tensor:
        shrunk = 1 / (values + ridge * level)
        leverage = rotated.square() @ shrunk + 1 / len(x)
        rest = moved - rotated @ (shrunk[:, None] * image)
        total: Tensor = (rest / (1 - leverage).clamp(min=1e-9)[:, None]).square().sum()
        return total

    ridge = min(ridges, key=lambda choice: float(missed(choice))) if len(ridges) > 1 and len(x) > 1 else ridges[-1]
    update = (basis / (values + ridge * level)) @ image  # Eᵀ
    matrix = torch.eye(x.shape[1]).to(x) + update.T
    return AffineMap(matrix, mean_to - matrix @ mean_from)


def calibrate(memory: GaussianMemory, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Transport the memory by the map of all pairs of the task."""
    memory.transport(paired_map(torch.cat(list(before)), torch.cat(list(after))))

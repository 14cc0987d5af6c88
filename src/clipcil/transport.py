"""Maps that transport stored class Gaussians when the vision tower changes.

All maps are computed in float64: a memory that passes many tasks multiplies many of them.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from clipcil.memory.gaussians import AffineMap, GaussianMemory
from clipcil.memory.ledoit_wolf import average_moments

RELATIVE_FLOOR = 1e-7
"""Eigenvalues of Σ below this share of ‖Σ‖_F are raised to this share, so that T stays finite and positive definite.

The paper does not say what T is for a nearly singular covariance. The floor of Σ₁^{1/2} Σ₂ Σ₁^{1/2} is the product of
both floors, 1e-14, which is still above the rounding of an eigensolver (1e-16): equal singular covariances give T ≈ I.
Ledoit–Wolf covariances lie far above the floor.
"""
RIDGES = tuple(10.0**power for power in range(-6, 4))
"""Candidate ridges of `paired_map`, as shares of the average variance of the features before."""
SDC_WIDTH = 0.2
"""σ of `sdc_shifts` for unit features, from the authors' script (yulu0724/SDC-IL, commit 4d9efc9, run_demo.sh)."""
CalibrationName = Literal["none", "task", "class", "pairs", "sdc"]
"""An option: see `transport_memory`; none leaves the stored Gaussians as they are, as DMC does."""


def transport_memory(
    how: CalibrationName, memory: GaussianMemory, before: Sequence[Tensor], after: Sequence[Tensor]
) -> None:
    """Transport the Gaussians of the old classes from the space before a change of the tower to the space after it.

    - task: one map between the task's averaged statistics, Eq. (4).
    - class: the average of one map per class, the paper's alternative (its Table 4). With fewer pictures than
      dimensions a class's covariance is mostly shrinkage, and so is its map: the paper finds 62.24 on CUB-200, where
      Eq. (4) has 78.11.
    - pairs: the linear map that best maps each feature before to its counterpart after. Learnable drift compensation
      (LDC, ECCV 2024, https://arxiv.org/abs/2407.08536) trains such a map by gradient descent; here it has a closed
      form, and its ridge is chosen by leave-one-out.
    - sdc: each stored mean moves by the shift of the new pictures near it; covariances stay. Semantic drift
      compensation (SDC, CVPR 2020, https://arxiv.org/abs/2004.00440).

    Args:
        how: Name of the calibration.
        memory: The Gaussians.
        before: (n_c, d) unit features of each class of the new task, by the tower before its change.
        after: (n_c, d) features of the same pictures by the tower after its change.
    """
    old, new = torch.cat(list(before)), torch.cat(list(after))
    if how == "task":
        memory.transport(bures_map(*average_moments(before), *average_moments(after)))
    elif how == "class":
        maps = [bures_map(*average_moments([b]), *average_moments([a])) for b, a in zip(before, after, strict=True)]
        matrices, offsets = zip(*maps, strict=True)
        memory.transport(AffineMap(torch.stack(matrices).mean(0), torch.stack(offsets).mean(0)))
    elif how == "pairs":
        memory.transport(paired_map(old, new))
    elif how == "sdc":
        memory.shift(sdc_shifts(memory.means(), old.double(), new.double()))


def bures_map(mean_from: Tensor, cov_from: Tensor, mean_to: Tensor, cov_to: Tensor) -> AffineMap:
    """The map that transports N(μ₁, Σ₁) to N(μ₂, Σ₂) at the least cost, Eq. (4).

        T = Σ₁^{-1/2} (Σ₁^{1/2} Σ₂ Σ₁^{1/2})^{1/2} Σ₁^{-1/2},    b = μ₂ − T μ₁

    T is symmetric positive definite and T Σ₁ T = Σ₂. The product is formed in the eigenbasis of Σ₁, so that only
    diagonal matrices are inverted; eigenvalues are floored by `RELATIVE_FLOOR`.

    Args:
        mean_from: (d,) μ₁.
        cov_from: (d, d) Σ₁.
        mean_to: (d,) μ₂.
        cov_to: (d, d) Σ₂.
    """
    mean_from, mean_to = mean_from.double(), mean_to.double()
    cov_from, cov_to = _symmetric(cov_from.double()), _symmetric(cov_to.double())
    floor_from, floor_to = (
        torch.clamp(RELATIVE_FLOOR * torch.linalg.matrix_norm(cov), min=1e-30) for cov in (cov_from, cov_to)
    )

    values, basis = torch.linalg.eigh(cov_from)  # (d,), (d, d)
    root = values.clamp(min=floor_from).sqrt()
    inner = root[:, None] * (basis.T @ cov_to @ basis) * root  # Σ₁^{1/2} Σ₂ Σ₁^{1/2} in the basis of Σ₁
    inner_values, inner_basis = torch.linalg.eigh(_symmetric(inner))
    # The fourth root on either side makes T a product Q Qᵀ: positive definite by construction.
    half = (basis / root) @ inner_basis * inner_values.clamp(min=floor_from * floor_to).pow(0.25)
    matrix = _symmetric(half @ half.T)
    return AffineMap(matrix, mean_to - matrix @ mean_from)


def paired_map(before: Tensor, after: Tensor) -> AffineMap:
    """The affine map that best maps each feature to its counterpart, regularised towards a plain shift.

        T = I + E,    E = argmin ‖X Eᵀ − D‖² + r ‖E‖²,    D = Y − X,    b = ȳ − T x̄

    with X, Y centred and r = ridge · ‖X‖²/d. The leave-one-out residual of picture i is d_i/(1 − h_i), with d_i its
    residual in the fit and h_i = x_iᵀ (XᵀX + r I)⁻¹ x_i + 1/n; that of `RIDGES` with the smallest residuals is taken.

    Args:
        before: (n, d) features by the tower before its change.
        after: (n, d) features of the same pictures by the tower after its change.

    Returns:
        The map, in float64. With one picture it is a shift.

    Examples:
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

    ridge = min(RIDGES, key=lambda choice: float(missed(choice))) if len(x) > 1 else RIDGES[-1]
    update = (basis / (values + ridge * level)) @ image  # Eᵀ
    matrix = torch.eye(x.shape[1]).to(x) + update.T
    return AffineMap(matrix, mean_to - matrix @ mean_from)


def sdc_shifts(means: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """How far each mean moves, (C, d); σ is `SDC_WIDTH`.

        Δ_c = Σ_i w_i (y_i − x_i) / Σ_i w_i,    w_i = exp(−‖x_i − μ_c‖² / 2σ²)

    Args:
        means: (C, d) stored means in the space before.
        before: (n, d) features x of the new pictures by the tower before its change.
        after: (n, d) features y of the same pictures by the tower after its change.

    Examples:
        >>> import torch
        >>> sdc_shifts(torch.zeros(1, 2), torch.zeros(3, 2), torch.ones(3, 2))
        tensor([[1., 1.]])
    """
    weights = torch.softmax(-torch.cdist(means, before).square() / (2 * SDC_WIDTH**2), dim=1)
    return weights @ (after - before)


def wasserstein2_to_samples(mean: Tensor, cov: Tensor, features: Tensor) -> Tensor:
    """W₂², Eq. (3), between N(μ, Σ) and the plain Gaussian N(x̄, BᵀB) of samples, B = (x − x̄)/√n.

        W₂² = ‖μ_a − μ_b‖² + Tr(Σ_a + Σ_b − 2(Σ_a^{1/2} Σ_b Σ_a^{1/2})^{1/2})

    Σ^{1/2} BᵀB Σ^{1/2} and B Σ Bᵀ share their non-zero eigenvalues, so an n×n eigenproblem is enough.

    Args:
        mean: (d,) μ.
        cov: (d, d) Σ.
        features: (n, d) samples x.
    """
    features, cov = features.double(), _symmetric(cov.double())
    centre = features.mean(0)
    rows = (features - centre) / len(features) ** 0.5  # (n, d)
    overlap = torch.linalg.eigvalsh(_symmetric(rows @ cov @ rows.T)).clamp(min=0).sqrt().sum()
    shift = (mean.double() - centre).square().sum()
    return torch.clamp(shift + cov.trace() + rows.square().sum() - 2 * overlap, min=0)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2

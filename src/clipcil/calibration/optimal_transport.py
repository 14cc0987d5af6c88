"""Optimal transport between Gaussians: the Bures–Wasserstein distance, Eq. (3), and map, Eq. (4) of the paper.

Everything here is computed in float64: T contains inverse square roots, and a memory that is transported through many
tasks multiplies many such maps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clipcil.memory.affine import AffineMap
from clipcil.memory.gaussians import GaussianMemory
from clipcil.memory.ledoit_wolf import average_moments

RELATIVE_FLOOR = 1e-7
"""Eigenvalues of Σ below this share of ‖Σ‖_F count as this share.

The paper does not say what T does where a covariance is (nearly) singular; we floor, because T must stay finite and
positive definite. An eigensolver finds the eigenvalues of Σ₁^{1/2} Σ₂ Σ₁^{1/2} to about 1e-16 of its norm, and its
floor is the product of both floors, so 1e-7 squared still stands above the rounding: equal singular covariances give
T ≈ I.
Ledoit–Wolf covariances lie far above the floor, which does not change them.
"""
TINY = 1e-30  # the floor of a covariance that is exactly zero


def bures_map(mean_from: Tensor, cov_from: Tensor, mean_to: Tensor, cov_to: Tensor) -> AffineMap:
    """The map that transports N(μ₁, Σ₁) to N(μ₂, Σ₂) at the least cost, Eq. (4).

        T = Σ₁^{-1/2} (Σ₁^{1/2} Σ₂ Σ₁^{1/2})^{1/2} Σ₁^{-1/2},    b = μ₂ − T μ₁

    Means (d,), covariances (d, d). T is symmetric positive definite and T Σ₁ T = Σ₂. Two `eigh`: one of Σ₁, one of the
    product, which is formed in the eigenbasis of Σ₁ so that only diagonal matrices are inverted. Eigenvalues are
    floored as `RELATIVE_FLOOR` says.
    """
    mean_from, mean_to = mean_from.double(), mean_to.double()
    cov_from, cov_to = _symmetric(cov_from.double()), _symmetric(cov_to.double())
    floor_from, floor_to = _floor(cov_from), _floor(cov_to)

    values, basis = torch.linalg.eigh(cov_from)  # (d,), (d, d)
    root = values.clamp(min=floor_from).sqrt()
    inner = root[:, None] * (basis.T @ cov_to @ basis) * root  # Σ₁^{1/2} Σ₂ Σ₁^{1/2} in the basis of Σ₁
    inner_values, inner_basis = torch.linalg.eigh(_symmetric(inner))
    # The fourth root on either side makes T a product Q Qᵀ: positive definite by construction.
    half = (basis / root) @ inner_basis * inner_values.clamp(min=floor_from * floor_to).pow(0.25)
    matrix = _symmetric(half @ half.T)
    return AffineMap(matrix, mean_to - matrix @ mean_from)


def calibrate(memory: GaussianMemory, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Transport the memory by one map between the task's averaged statistics, Eq. (4)."""
    memory.transport(bures_map(*average_moments(before), *average_moments(after)))


def wasserstein2_to_samples(mean: Tensor, cov: Tensor, features: Tensor) -> Tensor:
    """W₂², Eq. (3), between N(μ, Σ) and the plain Gaussian N(x̄, BᵀB) of `features` (n, d), B = (x − x̄)/√n.

        W₂² = ‖μ_a − μ_b‖² + Tr(Σ_a + Σ_b − 2(Σ_a^{1/2} Σ_b Σ_a^{1/2})^{1/2})

    Σ^{1/2} BᵀB Σ^{1/2} and B Σ Bᵀ share their non-zero eigenvalues, so the trace of the root needs an n×n eigenproblem
    only: cheap enough to measure the drift of every stored class against its old training pictures after every task.
    """
    features, cov = features.double(), _symmetric(cov.double())
    centre = features.mean(0)
    rows = (features - centre) / len(features) ** 0.5  # (n, d)
    overlap = torch.linalg.eigvalsh(_symmetric(rows @ cov @ rows.T)).clamp(min=0).sqrt().sum()
    shift = (mean.double() - centre).square().sum()
    return torch.clamp(shift + cov.trace() + rows.square().sum() - 2 * overlap, min=0)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2


def _floor(cov: Tensor) -> Tensor:
    return torch.clamp(RELATIVE_FLOOR * torch.linalg.matrix_norm(cov), min=TINY)

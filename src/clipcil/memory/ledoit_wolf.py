"""Ledoit–Wolf covariances of small classes in low-rank form, without ever forming the d×d matrix when n < d.

With X the n×d centred features, S = XᵀX/n and m = Tr(S)/d:

    Σ = (1−ρ) S + ρ m I,    ρ = min(β, δ)/δ,    δ = (‖S‖² − d m²)/d,    β = (Σᵢ ‖xᵢ‖⁴/n − ‖S‖²)/(d n)

and ‖S‖ = ‖XXᵀ‖/n is read from the n×n Gram matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from clipcil.errors import UserError

SPREAD_FLOOR = 1e-12
"""A class whose Tr(S) is below this share of ‖μ‖² has no spread: its pictures agree to float32 rounding."""
NOISE_FLOOR = 1e-4
"""Spread of a class that has none and no neighbours to borrow from: Tr(Σ) = 1e-4 ‖μ‖², that is 1 % of the feature's
length in a random direction. Small beside any real class, large enough that Σ can be inverted."""


@dataclass(frozen=True)
class Summary:
    """Statistics of a class: everything Ledoit–Wolf needs, unshrunk so that a later union is exact. All float64."""

    mean: Tensor  # (d,)
    rows: Tensor  # (r, d): B with S = BᵀB; the centred pictures over √n where n < d, else d rows from eigenvectors
    level: Tensor  # 0-d: m = Tr(S)/d
    shrinkage: Tensor  # 0-d: ρ
    count: int  # n

    @cached_property
    def has_spread(self) -> bool:
        """Whether the pictures differ at all; one picture, or copies of one, have no spread."""
        return bool(self.level * len(self.mean) > SPREAD_FLOOR * self.mean.square().sum())


def summarise(features: Tensor) -> Summary:
    """Statistics of one class from its features (n, d), which must be finite, n ≥ 1."""
    if features.ndim != 2 or not features.numel():
        raise UserError(f"features of a class have shape {tuple(features.shape)}: give at least one picture, as (n, d)")
    features = features.detach().double()
    count, dim = features.shape
    mean = features.mean(0)
    rows = (features - mean) / count**0.5  # (n, d)
    norms = rows.square().sum(1)
    product = rows @ rows.T if count < dim else rows.T @ rows
    level = norms.sum() / dim
    if not level.isfinite():  # one number that NaN and infinity anywhere in the features reach
        raise UserError("features of a class hold NaN or infinity: training has diverged, lower the learning rate")
    shrinkage = _shrinkage(norms.square().sum() * count**2, product.square().sum(), level, count, dim)
    return Summary(mean, rows if count < dim else _root(product), level, shrinkage, count)


def union(old: Summary, features: Tensor) -> Summary:
    """Statistics of the pictures behind `old` together with new `features` (n, d), as if all had been seen at once.

    Mean and S are exact. Where old.count < d, the old pictures follow from the rows, and ρ is exact too. Otherwise only
    Σᵢ‖xᵢ‖⁴ of the old pictures is missing for ρ, which is of order 1/n by then; the fourth moment of a Gaussian with
    the same S is used, E‖x + δ‖⁴ = (Tr S + ‖δ‖²)² + 2‖S‖² + 4 δᵀSδ.
    """
    features = features.detach().to(old.mean)
    dim = len(old.mean)
    if old.count < dim:
        return summarise(torch.cat([old.rows * old.count**0.5 + old.mean, features]))
    new = summarise(features)
    count = old.count + new.count
    mean = (old.mean * old.count + new.mean * new.count) / count
    shift, centred = old.mean - mean, features - mean
    old_cov = old.rows.T @ old.rows
    cov = (old.count * (old_cov + torch.outer(shift, shift)) + centred.T @ centred) / count
    old_fourth = (old_cov.trace() + shift @ shift).square() + 2 * old_cov.square().sum() + 4 * shift @ old_cov @ shift
    fourth = old.count * old_fourth + centred.square().sum(1).square().sum()
    level = cov.trace() / dim
    return Summary(mean, _root(cov), level, _shrinkage(fourth, cov.square().sum(), level, count, dim), count)


def floor_level(mean: Tensor) -> Tensor:
    """The variance per dimension of a class without spread and without neighbours; positive even at μ = 0."""
    return NOISE_FLOOR * mean.square().mean().clamp(min=1e-12)


def average_moments(groups: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Averages over classes of the Ledoit–Wolf moments, by one matrix product instead of one covariance per class.

        Σ̄ = YᵀY + mean(ρ_c m_c) I,    Y = the rows √((1−ρ_c)/C) B_c of all classes, stacked

    The paper does not say what to do with a class without spread (one picture, or copies of one). Such classes are left
    out of Σ̄, because scaling both sides of Eq. (4) alike leaves T as it is; if all are, Σ̄ is their average
    `floor_level` times I, so it can be inverted.

    Args:
        groups: (n_c, d) features of each class.

    Returns:
        μ̄ (d,) and Σ̄ (d, d), float64.
    """
    summaries = [summarise(group) for group in groups]
    mean = torch.stack([summary.mean for summary in summaries]).mean(0)
    spread = [summary for summary in summaries if summary.has_spread]
    if not spread:
        return mean, torch.stack([floor_level(s.mean) for s in summaries]).mean() * torch.eye(len(mean)).to(mean)
    stacked = torch.cat([((1 - s.shrinkage) / len(spread)).sqrt() * s.rows for s in spread])
    cov = stacked.T @ stacked
    cov.diagonal().add_(torch.stack([s.shrinkage * s.level for s in spread]).mean())
    return mean, cov


def _shrinkage(fourth: Tensor, square: Tensor, level: Tensor, count: int, dim: int) -> Tensor:
    """ρ from Σᵢ‖xᵢ‖⁴, ‖S‖² and m. In one dimension S = m I and ρ does not matter; 0 keeps the factor."""
    delta = (square - dim * level.square()) / dim
    beta = (fourth / count - square) / (dim * count)
    # By rounding β (n = 2) or δ (S = m I) can fall below zero, where a root of ρ or 1−ρ would be NaN.
    usable = (beta > 0) & (delta > 0) & (dim > 1)
    ratio = (beta / torch.where(usable, delta, 1)).clamp(max=1)
    return torch.where(usable, ratio, 0)


def _root(cov: Tensor) -> Tensor:
    """B (d, d) with BᵀB = cov; by `eigh` because a Cholesky factorisation fails where a dimension is constant."""
    values, basis = torch.linalg.eigh(cov)
    return torch.mul(values.clamp(min=0).sqrt()[:, None], basis.T)

"""Linear discriminant classifiers that learn class by class from running statistics and keep no picture."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

NO_SPREAD = 1e-12
"""A scatter below this share of the squared means is rounding: the pictures show no spread."""


class Discriminant(nn.Module, ABC):
    """Class means and a linear score for every class; how the covariance is found is up to the subclass."""

    centres: Tensor  # (C, d) float64
    weight: Tensor  # (C, d)
    bias: Tensor  # (C,)

    def __init__(self, dim: int, device: torch.device | None = None, precision: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(0, dim, dtype=torch.float64, device=device))
        self.register_buffer("weight", torch.zeros(0, dim, dtype=precision, device=device))
        self.register_buffer("bias", torch.zeros(0, dtype=precision, device=device))

    def grow(self, classes: int) -> None:
        """Make room for new classes; `add` fills it."""
        for name in ("centres", "weight", "bias"):
            value: Tensor = getattr(self, name)
            setattr(self, name, torch.cat([value, value.new_zeros(classes, *value.shape[1:])]))

    @torch.no_grad()
    def add(self, groups: Sequence[Tensor]) -> None:
        """Learn the newest classes from their features, (n_c, d) each, in the order of their labels."""
        groups = [group.to(self.centres) for group in groups]
        new = torch.stack([group.mean(0) for group in groups])
        deviations = torch.cat([group - centre for group, centre in zip(groups, new, strict=True)])
        old = self.centres[: len(self.centres) - len(groups)]
        self.centres = torch.cat([old, new])
        weight, bias = self.solve(old, new, deviations)
        self.weight, self.bias = weight.to(self.weight), bias.to(self.bias)

    @abstractmethod
    def solve(self, old: Tensor, new: Tensor, deviations: Tensor) -> tuple[Tensor, Tensor]:
        """Take in a task and return weight (C, d) and bias (C,) for all classes.

        Args:
            old: (C_old, d) means of the classes before the task.
            new: (C_new, d) means of its classes.
            deviations: (n, d) its features, each minus the mean of its class.
        """

    def forward(self, features: Tensor) -> Tensor:
        """(B, d) → (B, C) discriminant scores."""
        return (features.to(self.weight) @ self.weight.T + self.bias).to(features.dtype)


class DiscriminantHead(Discriminant):
    """One covariance shared by all classes, exact over everything seen.

    The pooled scatter Σ_c Σ_i (x_i − μ_c)(x_i − μ_c)ᵀ of a union is the sum of the scatters, so nothing is lost by
    learning in tasks: the head is the one that all pictures at once would give. Scores have mean 0 over the classes.
    """

    scatter: Tensor  # (d, d) float64
    count: Tensor  # 0-d float64: pictures seen

    def __init__(self, dim: int, device: torch.device | None = None) -> None:
        super().__init__(dim, device)
        self.register_buffer("scatter", torch.zeros(dim, dim, dtype=torch.float64, device=device))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64, device=device))

    def solve(self, old: Tensor, new: Tensor, deviations: Tensor) -> tuple[Tensor, Tensor]:
        """Linear discriminant analysis of all pictures seen."""
        self.scatter = self.scatter + deviations.T @ deviations
        self.count = self.count + len(deviations)
        return discriminant(self.centres, self.scatter, float(self.count))


class AveragedDiscriminantHead(Discriminant):
    """ENGINE's own head (LAMDA-CL/ICCV25-ENGINE, commit 8803d66): inverse covariances averaged over tasks.

        Ω ← k/C Ω + (C − k)/C Ω_new + k (C − k)/C³ (m − m_new)(m − m_new)ᵀ,    Ω_new = d (S + tr(S)/(n − 1) I)⁻¹
        w_c = Ω μ_c,   b_c = log(1/C) − ½ μ_cᵀ Ω μ_c

    k classes before the task and C with it; m and m_new the means of their class means; S the scatter of the task's n
    pictures. Scores are not centred. In float64, because what all classes have in common is much larger than what
    tells them apart. A task of single pictures, or of copies of one, says nothing about the spread and leaves Ω as it
    is, which is ours; Ω is the identity for the scores until there is some.
    """

    inverse: Tensor  # (d, d) float64

    def __init__(self, dim: int, device: torch.device | None = None) -> None:
        super().__init__(dim, device, torch.float64)
        self.register_buffer("inverse", torch.zeros(dim, dim, dtype=torch.float64, device=device))

    def solve(self, old: Tensor, new: Tensor, deviations: Tensor) -> tuple[Tensor, Tensor]:
        """Average the task's inverse covariance into that of the tasks before it."""
        known, seen, scatter = len(old), len(old) + len(new), deviations.T @ deviations
        if has_spread(scatter, new):
            fresh = torch.linalg.inv(ridged(scatter, len(deviations), new))
            if bool(self.inverse.any()):
                apart = old.mean(0) - new.mean(0)
                rank_one = known * (seen - known) / seen**3 * torch.outer(apart, apart)
                fresh = known / seen * self.inverse + (seen - known) / seen * fresh + rank_one
            self.inverse = fresh
        weight = self.centres @ self.inverse if bool(self.inverse.any()) else self.centres
        return weight, -math.log(seen) - 0.5 * (weight * self.centres).sum(1)


def has_spread(scatter: Tensor, means: Tensor) -> bool:
    """Whether a scatter is more than the rounding of features with these means (C, d), as that of copies is."""
    return float(scatter.trace()) > NO_SPREAD * float(means.square().sum())


def ridged(scatter: Tensor, count: float, means: Tensor) -> Tensor:
    """(S + tr(S)/(n−1) I) / d: the covariance estimator of Kubokawa and Srivastava, whose ridge fades as n grows.

    The identity where the pictures, of classes with these means, have no spread at all.
    """
    identity = torch.eye(len(scatter), dtype=scatter.dtype, device=scatter.device)
    ridge = float(scatter.trace()) / max(1.0, count - 1)
    return (scatter + ridge * identity) / len(scatter) if has_spread(scatter, means) else identity


def discriminant(centres: Tensor, scatter: Tensor, count: float) -> tuple[Tensor, Tensor]:
    """Linear discriminant analysis with equal priors: weight (C, d) and bias (C,).

        w_c = Σ⁻¹ μ_c,   b_c = −½ μ_cᵀ Σ⁻¹ μ_c,   Σ = (S + tr(S)/(n−1) I) / d

    S is the pooled scatter (d, d) of n = `count` pictures. Scores are defined up to a number that all classes share;
    the mean over classes is taken out of both w and b, so that no large common part has to cancel in single precision,
    and so that scores can be scaled to unit length. Pictures without any spread give the nearest class mean.
    """
    weight = torch.cholesky_solve(centres.T, torch.linalg.cholesky(ridged(scatter, count, centres))).T
    bias = -0.5 * (weight * centres).sum(1)
    return weight - weight.mean(0), bias - bias.mean()

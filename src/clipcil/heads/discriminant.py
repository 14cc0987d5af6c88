"""A linear discriminant classifier that learns class by class from running statistics and keeps no picture."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class DiscriminantHead(nn.Module):
    """Class means and one covariance shared by all classes, exact over everything seen: (C, d) and (d, d).

    The pooled scatter Σ_c Σ_i (x_i − μ_c)(x_i − μ_c)ᵀ of a union is the sum of the scatters, so nothing is lost by
    learning in tasks: the head is the one that all pictures at once would give.
    """

    centres: Tensor  # (C, d) float64
    scatter: Tensor  # (d, d) float64
    count: Tensor  # 0-d float64: pictures seen
    weight: Tensor  # (C, d)
    bias: Tensor  # (C,)

    def __init__(self, dim: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(0, dim, dtype=torch.float64, device=device))
        self.register_buffer("scatter", torch.zeros(dim, dim, dtype=torch.float64, device=device))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64, device=device))
        self.register_buffer("weight", torch.zeros(0, dim, device=device))
        self.register_buffer("bias", torch.zeros(0, device=device))

    def grow(self, classes: int) -> None:
        """Make room for new classes; `add` fills it."""
        for name in ("centres", "weight", "bias"):
            value: Tensor = getattr(self, name)
            setattr(self, name, torch.cat([value, value.new_zeros(classes, *value.shape[1:])]))

    @torch.no_grad()
    def add(self, groups: Sequence[Tensor]) -> None:
        """The pictures of the newest classes, (n_c, d) each, in the order of their labels."""
        groups = [group.to(self.scatter) for group in groups]
        centres = torch.stack([group.mean(0) for group in groups])
        deviations = torch.cat([group - centre for group, centre in zip(groups, centres, strict=True)])
        self.centres = torch.cat([self.centres[: len(self.centres) - len(groups)], centres])
        self.scatter = self.scatter + deviations.T @ deviations
        self.count = self.count + len(deviations)
        weight, bias = discriminant(self.centres, self.scatter, float(self.count))
        self.weight, self.bias = weight.to(self.weight), bias.to(self.bias)

    def forward(self, features: Tensor) -> Tensor:
        """(B, d) → (B, C): discriminant scores, of mean 0 over the classes."""
        return features @ self.weight.T + self.bias


def discriminant(centres: Tensor, scatter: Tensor, count: float) -> tuple[Tensor, Tensor]:
    """Linear discriminant analysis with equal priors: weight (C, d) and bias (C,).

        w_c = Σ⁻¹ μ_c,   b_c = −½ μ_cᵀ Σ⁻¹ μ_c,   Σ = (S + tr(S)/(n−1) I) / d

    S is the pooled scatter; this is the estimator of Kubokawa and Srivastava, whose ridge fades as pictures come in.
    Scores are defined up to a number that all classes share; the mean over classes is taken out of both w and b, so
    that no large common part has to cancel in single precision, and so that scores can be scaled to unit length.
    Pictures without any spread give the nearest class mean.
    """
    dim = scatter.shape[0]
    ridge = float(scatter.trace()) / max(1.0, count - 1)
    covariance = (scatter + ridge * torch.eye(dim).to(scatter)) / dim if ridge > 0 else torch.eye(dim).to(scatter)
    weight = torch.cholesky_solve(centres.T, torch.linalg.cholesky(covariance)).T
    bias = -0.5 * (weight * centres).sum(1)
    return weight - weight.mean(0), bias - bias.mean()

"""The discriminant of class statistics, and its leave-one-out scores for the pictures it has learnt."""

from __future__ import annotations

import torch
from torch import Tensor

from clipcil.heads.discriminant import NO_SPREAD, discriminant, has_spread


def scaled_discriminant(means: Tensor, counts: Tensor, scatter: Tensor) -> tuple[Tensor, Tensor]:
    """Weight (C, d) and bias (C,) whose scores are log densities of Gaussians, up to a number all classes share.

        score(x, c) = μ_cᵀ A⁻¹ x − ½ μ_cᵀ A⁻¹ μ_c,    A = (S + tr(S)/(n−1) I) / n

    Args:
        means: (C, d) of the classes.
        counts: (C,) pictures of each.
        scatter: S (d, d), pooled within the classes. Without any spread A = I: the nearest mean.
    """
    dim, count = means.shape[1], float(counts.sum())
    if not has_spread(scatter, means):
        return discriminant(means, torch.zeros_like(scatter), count)
    weight, bias = discriminant(means, scatter, count)  # its covariance is A n/d
    return weight * (count / dim), bias * (count / dim)


@torch.no_grad()
def nearest_distance(means: Tensor, counts: Tensor, scatter: Tensor, inputs: Tensor) -> Tensor:
    """(B,): min_c (x − μ_c)ᵀ A⁻¹ (x − μ_c) of inputs (B, d), with A of `scaled_discriminant`.

    The distances to two classes differ by twice the difference of their scores, so one of them gives all.
    """
    weight, bias = scaled_discriminant(means, counts, scatter)
    count, trace = float(counts.sum()), float(scatter.trace())
    identity = torch.eye(len(scatter)).to(scatter)
    flat = trace <= NO_SPREAD * float(means.square().sum())
    covariance = identity if flat else (scatter + trace / max(1.0, count - 1) * identity) / count
    root = torch.linalg.cholesky(covariance)
    first = torch.linalg.solve_triangular(root, (inputs - means[0]).T, upper=False).square().sum(0)
    scores = inputs @ weight.T + bias
    nearest: Tensor = first + 2 * (scores[:, 0] - scores.amax(1))
    return nearest


@torch.no_grad()
def leave_one_out(
    means: Tensor, counts: Tensor, scatter: Tensor, inputs: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Scores and distances of pictures that the statistics were made from, each without that picture.

    Without x of class y its mean is μ_y − δ/(n_y−1) and the scatter S − a δδᵀ, with δ = x − μ_y and a = n_y/(n_y−1).
    In the eigenbasis of S the other terms of A are diagonal, and the last is undone by the formula of Sherman and
    Morrison, so a picture costs O(C d).

    Args:
        means, counts, scatter: As above, with all pictures.
        inputs: (B, d), pictures among them.
        labels: (B,) their classes.

    Returns:
        Scores (B, C) of `scaled_discriminant`, their mean over the classes subtracted, and squared Mahalanobis
        distances (x − μ_c)ᵀ A⁻¹ (x − μ_c) (B, C). A picture that is alone in its class has the lowest score for it and
        the longest distance: without it there is no such class.
    """
    values, basis = torch.linalg.eigh(scatter)
    means, inputs = means @ basis, inputs @ basis
    own, rest = counts[labels].double(), float(counts.sum()) - 1
    others = (own - 1).clamp(min=1)
    deltas = inputs - means[labels]
    moved = means[labels] - deltas / others[:, None]  # (B, d): the mean of the own class without the picture
    factors = own / others
    traces = scatter.trace() - factors * deltas.square().sum(1)
    flat = traces <= NO_SPREAD * means.square().sum()
    use_scatter = (~flat).double()  # (B,): 1 where A holds S
    ridges = torch.where(flat, rest, traces / max(1.0, rest - 1))  # without spread A = I
    inverse = 1 / (use_scatter[:, None] * values.clamp(min=0) + ridges[:, None])  # (B, d): of all of A but δδᵀ
    solved = deltas * inverse
    gains = use_scatter * factors / (1 - use_scatter * factors * (deltas * solved).sum(1))

    def quadratic(linear: Tensor, square: Tensor, along: Tensor, along_input: Tensor) -> Tensor:
        """μᵀA⁻¹x − ½ μᵀA⁻¹μ from the products with the diagonal part and those with D⁻¹δ."""
        gain = gains if along.ndim == 1 else gains[:, None]
        result: Tensor = linear - square / 2 + gain * along * (along_input - along / 2)
        return result

    along_input = (inputs * solved).sum(1)
    scores = quadratic((inputs * inverse) @ means.T, inverse @ means.square().T, solved @ means.T, along_input[:, None])
    without = quadratic(
        (inputs * inverse * moved).sum(1), (inverse * moved.square()).sum(1), (solved * moved).sum(1), along_input
    )
    without = torch.where(own > 1, without, scores.min(dim=1).values - 1)
    scores[torch.arange(len(labels)), labels] = without
    squares = (inputs.square() * inverse).sum(1) + gains * along_input.square()
    scores, squares = scores * rest, squares * rest
    return scores - scores.mean(dim=1, keepdim=True), squares[:, None] - 2 * scores

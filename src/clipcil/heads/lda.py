"""Linear discriminant analysis: fitted to statistics or to rows, with exact leave-one-out distances and novelty.

All classes share one covariance, so the score of a class is linear in the features. Statistics (class means, pooled
scatter, counts) can be added up task by task and keep no feature of a picture; rows allow choosing the ridge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from clipcil.heads.stacked import Head, class_sums, likeliest

NO_SPREAD = 1e-12
"""A scatter below this share of the squared means is rounding: the pictures show no spread."""
RIDGES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Candidate ridges of `fit_rows`, as shares of the average eigenvalue of the scatter."""


class Statistics(NamedTuple):
    """Statistics of pictures, to which a discriminant is fitted."""

    means: Tensor  # (C, d) class means, float64
    counts: Tensor  # (C,) pictures of each class, or () of all; n is their sum
    scatter: Tensor  # (d, d) S, pooled within the classes, float64

    @classmethod
    def of(cls, rows: Tensor, labels: Tensor, classes: int) -> Statistics:
        """From features: rows (N, d), labels (N,) int64; every class has at least one row."""
        counts = torch.bincount(labels, minlength=classes).double()
        means = class_sums(rows, labels, classes) / counts[:, None]
        apart = rows - means[labels].to(rows)
        return cls(means, counts, (apart.T @ apart).double())

    @property
    def has_spread(self) -> bool:
        """Whether the scatter is more than rounding, which is all that copies of pictures have."""
        return float(self.scatter.trace()) > NO_SPREAD * float(self.means.square().sum())

    def covariance(self, divisor: float) -> Tensor:
        """(S + tr(S)/(n−1) I) / divisor, the identity without spread. Kubokawa and Srivastava's ridge fades with n.

        Args:
            divisor: d for ENGINE's scale, n for log densities.
        """
        identity = torch.eye(len(self.scatter)).to(self.scatter)
        ridge = float(self.scatter.trace()) / max(1.0, float(self.counts.sum()) - 1)
        return (self.scatter + ridge * identity) / divisor if self.has_spread else identity

    def fit(self, densities: bool = True) -> tuple[Tensor, Tensor]:
        """Linear discriminant analysis with equal priors.

            w_c = A⁻¹ μ_c,    b_c = −½ μ_cᵀ A⁻¹ μ_c,    A = (S + tr(S)/(n−1) I) / n

        The mean over the classes is taken out of w and b: scores are defined up to a number that all classes share, and
        a large common part would cost digits in single precision. Without any spread A = I, the nearest class mean.

        Args:
            densities: Scores are log densities of Gaussians; otherwise A is divided by d instead of n.

        Returns:
            weight (C, d) and bias (C,).
        """
        count, dim = float(self.counts.sum()), len(self.scatter)
        weight = torch.cholesky_solve(self.means.T, torch.linalg.cholesky(self.covariance(dim))).T
        bias = -0.5 * (weight * self.means).sum(1)
        factor = count / dim if densities and self.has_spread else 1.0
        return (weight - weight.mean(0)) * factor, (bias - bias.mean()) * factor

    @torch.no_grad()
    def nearest_distance(self, inputs: Tensor) -> Tensor:
        """min_c (x − μ_c)ᵀ A⁻¹ (x − μ_c): (B, d) → (B,).

        The distances to two classes differ by twice the difference of their scores, so one of them gives all.
        """
        weight, bias = self.fit()
        root = torch.linalg.cholesky(self.covariance(float(self.counts.sum())))
        first = torch.linalg.solve_triangular(root, (inputs - self.means[0]).T, upper=False).square().sum(0)
        scores = inputs @ weight.T + bias
        return first + 2 * (scores[:, 0] - scores.amax(1))

    @torch.no_grad()
    def leave_one_out(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and distances of pictures that the statistics were made from, each without that picture.

        Args:
            inputs: (B, d) pictures among those of the statistics.
            labels: (B,) their classes.

        Returns:
            Scores (B, C) as `fit` gives them, their mean over the classes subtracted, and squared Mahalanobis distances
            (B, C). A picture alone in its class has the lowest score and the longest distance there.
        """
        values, basis = torch.linalg.eigh(self.scatter)
        means, inputs, counts = self.means @ basis, inputs @ basis, self.counts.double()
        rest, own, rows = float(counts.sum()) - 1, counts[labels], torch.arange(len(labels), device=labels.device)
        growth, squares = own / (own - 1).clamp(min=1), (inputs - means[labels]).square().sum(1)
        traces = self.scatter.trace() - growth * squares
        flat = traces <= NO_SPREAD * means.square().sum()  # without the picture there is no spread: A = I
        ridges = torch.where(flat, 1.0, traces / max(1.0, rest - 1))
        distances = rest * distances_without_each(inputs, labels, means, counts, values.clamp(min=0), ridges)
        plain = torch.cdist(inputs, means).square()
        plain[rows, labels] = growth**2 * squares
        distances = torch.where(flat[:, None], plain, distances)
        distances[rows, labels] = torch.where(own > 1, distances[rows, labels], distances.amax(1) + 2 * rest)
        scores = -distances / 2
        return scores - scores.mean(dim=1, keepdim=True), distances


@dataclass(frozen=True)
class LDA(Head):
    """A discriminant fitted to rows."""

    means: Tensor  # (C, D) class means
    inputs: Tensor  # (R, D) the `left_out_rows`
    norms: Tensor  # (R,) ‖x‖²_A of the `left_out_rows`, with A fitted to all rows


def fit_rows(
    rows: Tensor, labels: Tensor, classes: int, left_out_rows: Tensor, ridges: Sequence[float] = RIDGES
) -> LDA:
    """Linear discriminant analysis with equal priors, its ridge chosen by leave-one-out.

        score_c(x) = −½ ‖x − μ_c‖²_A + const(x),    A = (n − C) (S + r I)⁻¹,    S = Σ_i z_i z_iᵀ,  z_i = x_i − μ_{y_i}

    With fewer rows than dimensions the same solution comes from an N×N matrix: S, the means and the rows lie in the
    span of the rows, and A is the same there.

    Args:
        rows: (N, D) features; every class has at least one.
        labels: (N,) int64.
        classes: C.
        left_out_rows: (R,) indices of the rows to compute leave-one-out scores of; their classes have two rows or more.
        ridges: Candidates of r, as shares of tr(S)/D. The one with the likeliest left-out pictures is chosen.

    Examples:
        >>> import torch
        >>> rows, labels = torch.tensor([[0.0], [1.0], [5.0], [6.0]]), torch.tensor([0, 0, 1, 1])
        >>> head = fit_rows(rows, labels, 2, torch.arange(4))
        >>> (head.left_out.argmax(1) == labels).all().item()
        True
    """
    few = len(rows) < rows.shape[1]
    span = torch.linalg.qr(rows.double().T).Q if few else None  # (D, N)
    means, counts, scatter = Statistics.of(rows if span is None else rows.double() @ span, labels, classes)
    level = scatter.trace() / rows.shape[1]
    if not level > 0:  # one picture a class: the nearest mean
        scatter, level = torch.eye(len(scatter)).to(scatter), scatter.new_ones(())
    values, basis = torch.linalg.eigh(scatter)
    if span is not None:
        means, basis = means @ span.T, span @ basis
    values, inputs, own = values.clamp(min=0), rows[left_out_rows].double(), labels[left_out_rows]
    x, m = inputs @ basis, means @ basis
    freedom = max(1, len(rows) - classes)

    def left_out(ridge: float) -> Tensor:
        return -0.5 * freedom * distances_without_each(x, own, m, counts, values, ridge * level)

    ridge, scores = likeliest(left_out, ridges, own)
    metric = freedom / (values + ridge * level)
    weight, bias = basis @ (metric[:, None] * m.T), -0.5 * (metric * m.square()).sum(1)
    return LDA(weight, bias, scores, ridge, means, inputs, (metric * x.square()).sum(1))


def distances_without_each(
    x: Tensor, labels: Tensor, means: Tensor, counts: Tensor, values: Tensor, ridge: Tensor
) -> Tensor:
    """Squared distances of learnt pictures to all class means, each by the statistics without that picture: (B, C).

    Without picture x of a class of n_c the scatter is S − a z zᵀ with z = x − μ_c and a = n_c/(n_c − 1), and x − μ_c
    becomes a z, so that with distances in the metric B = (S + r I)⁻¹ and h = ‖z‖²_B (Sherman–Morrison)

        ‖x − μ_k‖² = ‖x − μ_k‖²_B + a ⟨z, x − μ_k⟩²_B / (1 − a h),    ‖x − μ_c‖² = a² h / (1 − a h).

    Args:
        x: (B, D) pictures among those of the statistics, in the eigenbasis of S.
        labels: (B,) their classes, c; the distance of a picture alone in its class to that class is 0.
        means: (C, D) class means μ in the eigenbasis of S.
        counts: (C,) float64, pictures of each class.
        values: (D,) eigenvalues of S.
        ridge: r, 0-d for all pictures or (B,).
    """
    z, a = x - means[labels], (counts / (counts - 1).clamp(min=1))[labels]
    root = (values + ridge[..., None]).rsqrt()  # (D,) or (B, D)
    xs, zs = x * root, z * root
    if ridge.ndim:
        norms, along_x, along_z = root.square() @ means.square().T, (xs * root) @ means.T, (zs * root) @ means.T
    else:
        ms = means * root
        norms, along_x, along_z = ms.square().sum(1), xs @ ms.T, zs @ ms.T
    h = zs.square().sum(1)
    rest = (1 - a * h).clamp(min=1e-9)
    squared = xs.square().sum(1, keepdim=True) + norms - 2 * along_x
    inner = (zs * xs).sum(1, keepdim=True) - along_z
    distances: Tensor = squared + (a / rest)[:, None] * inner.square()
    distances[torch.arange(len(labels), device=labels.device), labels] = a.square() * h / rest
    return distances


class Background(NamedTuple):
    """One Gaussian of all pictures: Q, (C, C) float64, and s, the number of pictures minus the number of classes.

    The relative Mahalanobis distance (https://arxiv.org/abs/2106.09022) is a novelty score,

        score(x) = min_k ‖x − μ_k‖²_A − ‖x‖²_{A₀},    A = s (S + r I)⁻¹,    A₀ = s (S + Σ_k n_k μ_k μ_kᵀ + r I)⁻¹

    with features centred on the mean of all pictures. A direction in which all classes have the same variance is in
    both terms and cancels. A − A₀ has rank C (Woodbury), and with the discriminant's own weights W = A μ and scores s_k
    the score of a new picture needs no D×D matrix:

        score(x) = vᵀQv − 2 max_k s_k,    v = Wᵀx,    Q = N (I + N μᵀAμ N / s)⁻¹ N / s,    N = diag(√n_k)
    """

    matrix: Tensor
    freedom: int

    @classmethod
    def of(cls, head: LDA, counts: Tensor) -> Background:
        """From a discriminant fitted to centred rows, and the number of rows of each class (C,)."""
        freedom, roots = max(1, int(counts.sum()) - len(counts)), counts.double().sqrt()
        inner = torch.eye(len(counts)).to(head.means) + roots[:, None] * (head.means @ head.weight) * roots / freedom
        return cls(roots[:, None] * torch.linalg.inv(inner) * roots / freedom, freedom)

    def left_out(self, head: LDA, total: int) -> Tensor:
        """(R,): ‖x‖²_{A₀} of the `left_out_rows` of `head`, each without itself; `total` rows were fitted."""
        scores = head.inputs @ head.weight
        h = (head.norms - ((scores @ self.matrix) * scores).sum(1)) / self.freedom
        a = total / max(1, total - 1)
        return self.freedom * a**2 * h / (1 - a * h).clamp(min=1e-9)


def relative_distance(scores: Tensor, bias: Tensor, background: Tensor) -> Tensor:
    """(B,): the novelty score by a discriminant's scores (B, C) and bias (C,), and Q (C, C) of its `Background`.

    Examples:
        >>> import torch
        >>> relative_distance(torch.tensor([[0.0, 2.0]]), torch.zeros(2), torch.zeros(2, 2))
        tensor([-4.])
    """
    inner = scores - bias
    return ((inner @ background) * inner).sum(1) - 2 * scores.amax(1)


class RunningHead(nn.Module):
    """A discriminant that learns task by task from statistics: class means, and one covariance shared by all classes.

    Pooled: exact, because the scatter of all tasks is the sum of their scatters. Averaged: ENGINE's own head
    (LAMDA-CL/ICCV25-ENGINE, commit 8803d66), inverse covariances averaged over tasks,

        Ω ← k/C Ω + (C − k)/C Ω_new + k (C − k)/C³ (m − m_new)(m − m_new)ᵀ,    Ω_new = d (S + tr(S)/(n − 1) I)⁻¹
        w_c = Ω μ_c,   b_c = log(1/C) − ½ μ_cᵀ Ω μ_c

    k classes before the task and C with it; m and m_new the means of their class means; S the scatter of the task's n
    pictures. Its scores are not centred, so they are float64. Ours: a task without spread does not change Ω, and until
    the first task with spread the scores take the identity for Ω.

    Args:
        dim: d.
        averaged: Average inverse covariances instead of pooling the scatters.
    """

    centres: Tensor  # (C, d) float64
    weight: Tensor  # (C, d)
    bias: Tensor  # (C,)
    scatter: Tensor  # (d, d) float64; pooled
    count: Tensor  # 0-d float64: pictures seen; pooled
    inverse: Tensor  # (d, d) float64: Ω; averaged

    def __init__(self, dim: int, averaged: bool = False) -> None:
        super().__init__()
        self.averaged = averaged
        exact, scores = torch.float64, torch.float64 if averaged else torch.float32
        self.register_buffer("centres", torch.zeros(0, dim, dtype=exact))
        self.register_buffer("weight", torch.zeros(0, dim, dtype=scores))
        self.register_buffer("bias", torch.zeros(0, dtype=scores))
        self.register_buffer("inverse" if averaged else "scatter", torch.zeros(dim, dim, dtype=exact))
        if not averaged:
            self.register_buffer("count", torch.zeros((), dtype=exact))

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
        task = Statistics(new, torch.tensor(len(deviations)), deviations.T @ deviations)
        if not self.averaged:
            self.scatter, self.count = self.scatter + task.scatter, self.count + task.counts
            weight, bias = Statistics(self.centres, self.count, self.scatter).fit(densities=False)
        else:
            known, seen = len(old), len(self.centres)
            if task.has_spread:
                fresh = torch.linalg.inv(task.covariance(len(task.scatter)))
                if bool(self.inverse.any()):
                    apart = old.mean(0) - new.mean(0)
                    rank_one = known * (seen - known) / seen**3 * torch.outer(apart, apart)
                    fresh = known / seen * self.inverse + (seen - known) / seen * fresh + rank_one
                self.inverse = fresh
            weight = self.centres @ self.inverse if bool(self.inverse.any()) else self.centres
            bias = -math.log(seen) - 0.5 * (weight * self.centres).sum(1)
        self.weight, self.bias = weight.to(self.weight), bias.to(self.bias)

    def forward(self, features: Tensor) -> Tensor:
        """(B, d) → (B, C) discriminant scores."""
        return (features.to(self.weight) @ self.weight.T + self.bias).to(features.dtype)

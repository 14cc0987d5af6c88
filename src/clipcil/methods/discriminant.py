"""Discriminant: keeps the mean and the scatter of every class and nothing else; exact for every order of the classes.

A streaming discriminant with a shared covariance, as in Deep SLDA (https://arxiv.org/abs/1909.01520), with exact
forgetting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.data.reader import Batch
from clipcil.data.tasks import Task
from clipcil.heads.lda import Statistics
from clipcil.memory.rows import check_rows
from clipcil.methods.base import Method
from clipcil.methods.registry import register


@register
class Discriminant(Method):
    """Linear discriminant analysis with one covariance shared by all classes, on frozen unit features.

        score(x, c) = μ_cᵀ A⁻¹ x − ½ μ_cᵀ A⁻¹ μ_c,    A = (S + r I) / n,    r = tr(S)/(n−1)

    n pictures in all, S = Σ_c S_c the scatter within the classes. The ridge r loses influence as n grows; with few
    pictures this is nearly the nearest class mean. Features are taken before CLIP's last projection.

    Every class keeps its mean, its number of pictures and rows B_c with B_cᵀB_c = S_c, and classes share only what is
    computed from these. So adding pictures of a class, and forgetting a class, give the same model as learning the
    remaining pictures at once.
    """

    name = "discriminant"
    title = "Discriminant"
    keeps = "class means and scatters"
    means: Tensor  # (C, d) float64
    counts: Tensor  # (C,) int64: pictures behind each mean
    ranks: Tensor  # (C,) int64: rows of each class
    rows: Tensor  # (R, d) float32: B_c of every class, one class after another
    weight: Tensor  # (C, d)
    bias: Tensor  # (C,)

    def build(self) -> None:
        dim = self.clip.config.vision.width
        self.growing_buffer("means", dim, dtype=torch.float64)
        self.growing_buffer("counts", dtype=torch.int64)
        self.growing_buffer("ranks", dtype=torch.int64)
        self.growing_buffer("weight", dim)
        self.growing_buffer("bias")
        self.register_buffer("rows", torch.zeros(0, dim, device=self.device))

    def learn_task(self, task: Task) -> None:
        self.learn_again(task)

    @torch.no_grad()
    def learn_again(self, task: Task) -> None:
        """S of a union: S₁ + S₂ + n₁n₂/(n₁+n₂) (μ₁−μ₂)(μ₁−μ₂)ᵀ, one row more."""
        features, labels = _inputs(task.pictures), task.pictures.labels
        parts = list(torch.split(self.rows, self.ranks.tolist()))
        means, counts = self.means.clone(), self.counts.clone()
        for label in torch.unique(labels).tolist():
            group = features[labels == label]
            old, new, mean = int(counts[label]), len(group), group.mean(0)
            shift = (old * new / (old + new)) ** 0.5 * (mean - means[label])
            own = [parts[label].double(), group - mean, *([shift[None]] if old else [])]
            parts[label] = _compressed(torch.cat(own)).to(self.rows)
            means[label] = (old * means[label] + new * mean) / (old + new)
            counts[label] = old + new
        self.means, self.counts, self.rows = means, counts, torch.cat(parts)
        self.ranks = torch.tensor([len(part) for part in parts], device=self.ranks.device)
        self._refit()

    @torch.no_grad()
    def forget(self, index: int) -> None:
        start = int(self.ranks[:index].sum())
        self.rows = torch.cat([self.rows[:start], self.rows[start + int(self.ranks[index]) :]])
        self.drop_class(index)
        self._refit()

    def logits(self, batch: Batch) -> Tensor:
        return normalize(batch.pooled, dim=-1) @ self.weight.T + self.bias

    def leave_one_out(self, batch: Batch, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B, C) and novelty (B,) of pictures learnt as `labels` (B,), each by the model without it."""
        scores, distances = self._statistics().leave_one_out(_inputs(batch), labels)
        return scores, distances.amin(1)

    def novelty(self, batch: Batch) -> Tensor:
        """(B,): the squared Mahalanobis distance to the nearest class, min_c (x − μ_c)ᵀ A⁻¹ (x − μ_c)."""
        return self._statistics().nearest_distance(_inputs(batch))

    def _statistics(self) -> Statistics:
        rows = self.rows.double()
        return Statistics(self.means, self.counts, rows.T @ rows)

    def _refit(self) -> None:
        weight, bias = self._statistics().fit()
        self.weight, self.bias = weight.to(self.weight), bias.to(self.bias)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Take the number of rows from the file."""
        if prefix + "rows" in state_dict:  # another width than the backbone's is a mismatch, which loading reports
            self.rows = self.rows.new_empty(len(state_dict[prefix + "rows"]), self.rows.shape[1])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        check_rows(self.rows, self.ranks)
        if bool((self.counts < 1).any()):
            raise ValueError("a class of no picture")


def _inputs(batch: Batch) -> Tensor:
    return normalize(batch.pooled, dim=-1).double()


def _compressed(rows: Tensor) -> Tensor:
    """At most d rows R with RᵀR = BᵀB, by QR."""
    return rows if len(rows) <= rows.shape[1] else torch.linalg.qr(rows, mode="r").R

"""Discriminant (after https://arxiv.org/abs/1909.01520): a mean and a scatter for each class, no feature of a picture.

    score(x, c) = μ_cᵀ A⁻¹ x − ½ μ_cᵀ A⁻¹ μ_c,    A = (S + r I) / n,    S = Σ_c S_c,    r = tr(S)/(n−1)

One covariance A is shared by all classes, as in the paper, Deep SLDA; S_c is the scatter of the
n_c pictures of class c, n = Σ n_c. The ridge r loses influence as n grows; with few pictures this is nearly the nearest
class mean. Features are those before CLIP's last projection, of unit length.

Every class keeps its mean, its number of pictures and rows B_c with B_cᵀB_c = S_c, and classes share only what is
computed from these. So adding pictures of a class, and forgetting a class, give the same model as learning the
remaining pictures at once.

Examples:
    >>> import clipcil
    >>> experiment = clipcil.Experiment("discriminant", data="emoji", tasks=10)
    >>> for task in experiment:
    ...     experiment.learn(task)
    >>> experiment.evaluate().last
    77.0
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.data.reader import Batch
from clipcil.data.tasks import Task
from clipcil.heads.lda import Statistics
from clipcil.memory.rows import check_rows, without
from clipcil.methods.base import Method
from clipcil.methods.registry import register


@register
class Discriminant(Method):
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

    @torch.no_grad()
    def learn_task(self, task: Task) -> None:
        """S of a union: S₁ + S₂ + n₁n₂/(n₁+n₂) (μ₁−μ₂)(μ₁−μ₂)ᵀ, one row more."""
        features, labels = _inputs(task.pictures), task.pictures.labels
        parts = list(torch.split(self.rows, self.ranks.tolist()))
        means, counts = self.means.clone(), self.counts.clone()
        for label in torch.unique(labels).tolist():
            group = features[labels == label]
            old, new, mean = int(counts[label]), len(group), group.mean(0)
            shift = (old * new / (old + new)) ** 0.5 * (mean - means[label])
            own = torch.cat([parts[label].double(), group - mean, *([shift[None]] if old else [])])
            own = own if len(own) <= own.shape[1] else torch.linalg.qr(own, mode="r").R  # RᵀR = BᵀB
            parts[label] = own.to(self.rows)
            means[label] = (old * means[label] + new * mean) / (old + new)
            counts[label] = old + new
        self.means, self.counts, self.rows = means, counts, torch.cat(parts)
        self.ranks = torch.tensor([len(part) for part in parts], device=self.ranks.device)
        self._refit()

    learn_again = learn_task

    @torch.no_grad()
    def forget(self, index: int) -> None:
        self.rows = without(self.rows, int(self.ranks[:index].sum()), int(self.ranks[index]))
        self.drop_class(index)
        self._refit()

    def logits(self, batch: Batch) -> Tensor:
        return normalize(batch.pooled, dim=-1) @ self.weight.T + self.bias

    def novelty(self, batch: Batch) -> Tensor:
        """(B,): the squared Mahalanobis distance to the nearest class, min_c (x − μ_c)ᵀ A⁻¹ (x − μ_c)."""
        return self._statistics().nearest_distance(_inputs(batch))

    def leave_one_out(self, batch: Batch, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores, distances = self._statistics().leave_one_out(_inputs(batch), labels)
        return scores, distances.amin(1)

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

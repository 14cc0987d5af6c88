"""A novelty score of pictures: the relative Mahalanobis distance (https://arxiv.org/abs/2106.09022).

    score(x) = min_k ‖x − μ_k‖²_A − ‖x‖²_{A₀},    A = s (S + r I)⁻¹,    A₀ = s (S + Σ_k n_k μ_k μ_kᵀ + r I)⁻¹

with features centred on the mean of all pictures, so that A₀ belongs to one Gaussian of all pictures, the background. A
direction in which all classes have the same variance is in both terms and cancels. A − A₀ has rank C (Woodbury), and
with the discriminant's own weights W = A μ and scores s_k the score of a new picture needs no D×D matrix:

    score(x) = vᵀQv − 2 max_k s_k,    v = Wᵀx,    Q = N (I + N μᵀAμ N / s)⁻¹ N / s,    N = diag(√n_k)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clipcil.heads.lda import LDA


class Background(NamedTuple):
    """Q of the formula above, (C, C) float64, and s, the number of pictures minus the number of classes."""

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
    """(B,): the score of pictures by a discriminant's scores (B, C) and bias (C,); background: Q (C, C).

    Example:
        >>> import torch
        >>> relative_distance(torch.tensor([[0.0, 2.0]]), torch.zeros(2), torch.zeros(2, 2))
        tensor([-4.])
    """
    inner = scores - bias
    return ((inner @ background) * inner).sum(1) - 2 * scores.amax(1)

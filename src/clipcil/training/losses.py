"""Losses that several methods share."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """The symmetric CLIP loss, Eq. (1) of DMC, from the scores (B, C) of pictures against class texts; labels (B,).

    One frozen text serves a class, so the B texts of the batch are `count` copies of each class's: the sum over the
    batch's texts is a sum over classes with + log count, and nothing of size B×B is encoded. Scores of mixed precision
    are taken to single precision first: bfloat16 cannot count beyond 256.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    counts = torch.zeros(scores.shape[1], device=scores.device, dtype=scores.dtype)
    counts = counts.index_add(0, labels, counts.new_ones(len(labels)))
    own = scores.gather(1, labels[:, None]).squeeze(1)
    to_texts = torch.logsumexp(scores + counts.log(), dim=1)  # a class absent from the batch adds exp(−∞) = 0
    to_pictures = torch.logsumexp(scores, dim=0)[labels]
    return (0.5 * (to_texts + to_pictures) - own).mean()


def orthogonality(tasks: Tensor) -> Tensor:
    """Eq. (6) of DMC: 1/(K(K−1)) Σ_{i≠j} (f_t(P_i)ᵀ f_t(P_j))² of unit task texts (K, dim); 0 for one task."""
    count = len(tasks)
    if count < 2:
        return tasks.new_zeros(())
    gram = tasks @ tasks.T
    return (gram.square().sum() - gram.diagonal().square().sum()) / (count * (count - 1))

"""The losses that several methods share, in the precisions they are computed in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clipcil.training.losses import clip_loss


def loss_and_gradient(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    scores = scores.clone().requires_grad_()
    value = clip_loss(scores, labels)
    value.backward()
    assert scores.grad is not None
    return value.detach().float(), scores.grad.float()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_scores_of_mixed_precision_are_counted_exactly(kind: torch.dtype) -> None:
    labels = torch.tensor([0] * 900 + [1] * 300)
    scores = torch.randn(1200, 2, generator=torch.Generator().manual_seed(0)).to(kind)
    wanted, steep = loss_and_gradient(scores.float(), labels)
    value, gradient = loss_and_gradient(scores, labels)
    torch.testing.assert_close(value, wanted, rtol=1e-6, atol=0)
    assert (gradient - steep).norm() < 0.01 * steep.norm()  # the gradient itself is rounded to the scores' precision

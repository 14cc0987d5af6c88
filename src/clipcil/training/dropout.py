"""Dropout by few random numbers.

PyTorch draws 64 random bits for each number that may be dropped. On a CPU that takes as long as a matrix product of the
same tensor; 16 bits are enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STEPS = 2**16


def keep_share(share: float) -> float:
    """What is kept on average where `share` is to be dropped: it is rounded to a multiple of 2⁻¹⁶."""
    return 1 - round(share * STEPS) / STEPS


def draw_kept(shape: Sequence[int], share: float, device: torch.device) -> Tensor:
    """A mask of this shape, False for about `share` of its entries, each drawn independently of the others."""
    count = int(torch.Size(shape).numel())
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=device).random_(-(2**63), None)
    return words.view(torch.int16)[:count].view(tuple(shape)) >= round(share * STEPS) - STEPS // 2


def quick_dropout(hidden: Tensor, share: float) -> Tensor:
    """Numbers of `hidden` set to 0 with probability `share`, the others divided by what is kept on average."""
    mask = draw_kept(hidden.shape, share, hidden.device).to(hidden.dtype)
    return hidden * mask.mul_(1 / keep_share(share))

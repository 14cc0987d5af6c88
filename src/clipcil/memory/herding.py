"""Herding: which pictures of a class to keep so that their mean stays close to the mean of the class."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


@torch.no_grad()
def herd(features: Tensor, count: int) -> Tensor:
    """Rows of `features` (n, d) to keep, best first: (min(count, n),) int64. iCaRL's greedy choice,

        p_k = argmin_x ‖μ − (x + Σ_{j<k} p_j)/k‖    over the rows not chosen yet,

    on L2-normalised features. Because the order is greedy, a shorter memory is a prefix of a longer one. The mean of
    the normalised features is not normalised again; the implementations of the methods compared with do not either.
    """
    unit = functional.normalize(features.detach().double(), dim=1)  # float64: near ties must not depend on rounding
    mean = unit.mean(0)
    # ‖kμ − s − x‖² = ‖kμ − s‖² − 2x·(kμ − s) + ‖x‖², so the nearest row has the largest x·(kμ − s) − ‖x‖²/2.
    toward_mean, half_norm = unit @ mean, unit.square().sum(1) / 2  # (n,), (n,)
    overlap = torch.zeros_like(toward_mean)  # x · s, s = the sum of the rows chosen so far
    taken = torch.zeros_like(toward_mean)  # −∞ at rows already chosen
    chosen = torch.empty(max(0, min(count, len(unit))), dtype=torch.int64, device=unit.device)
    for k in range(len(chosen)):
        best = (toward_mean * (k + 1) - overlap - half_norm + taken).argmax()
        chosen[k] = best
        taken[best] = -torch.inf
        overlap += unit @ unit[best]
    return chosen

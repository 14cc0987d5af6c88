"""Visual prompts: functions that L2P, DualPrompt and CODA-Prompt share.

Learnt vectors steer a frozen tower, among its tokens (L2P) or in front of a layer's keys and values (DualPrompt and
CODA-Prompt). The query of a picture, its feature from the same tower without prompts, chooses its vectors.
"""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import AfterValidator
from torch import Tensor, nn
from torch.nn.functional import normalize

from clipcil.clip.layers import Prefix


def _ordered(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError("the lower number comes first, as in -1,1")
    return bounds


Range = Annotated[tuple[float, float], AfterValidator(_ordered)]
"""An option: the bounds of U[low, high)."""


def cosine(queries: Tensor, keys: Tensor) -> Tensor:
    """cos(q_b, k_n): queries (B, dim), keys (N, dim) → (B, N)."""
    return normalize(queries, dim=-1) @ normalize(keys, dim=-1).T


def choose(similarity: Tensor, count: int, together: bool = False) -> Tensor:
    """The prompts of each picture: similarity (B, N) → the `count` nearest keys, (B, count) int64.

    `together`: all pictures get those that most of the batch chose (the reference's "batchwise" choice). For training
    only: at test time the answer for a picture would depend on its batch.
    """
    chosen = similarity.topk(count, dim=1).indices
    if not together:
        return chosen
    votes = torch.bincount(chosen.flatten(), minlength=similarity.shape[1])
    return votes.topk(count).indices.expand(len(similarity), -1)


def uniform(*shape: int, between: Sequence[float], device: torch.device) -> nn.Parameter:
    """A parameter drawn from U[low, high), `between` = (low, high); frozen until a stage trains it."""
    low, high = between
    return nn.Parameter((low + (high - low) * torch.rand(*shape)).to(device), requires_grad=False)


def existing(layers: Sequence[int], depth: int) -> list[int]:
    """Those of `layers`, which the papers name for 12, that a tower of `depth` layers has; in order, each once."""
    return [layer for layer in dict.fromkeys(layers) if layer < depth]


def missing_note(layers: Sequence[int], depth: int) -> list[str]:
    """A remark for reports where `existing` has dropped layers."""
    missing = [str(layer) for layer in dict.fromkeys(layers) if layer >= depth]
    return [f"the tower has {depth} layers: no prompts at layer {', '.join(missing)}"] if missing else []


def prefixes(layers: Sequence[int], prompts: Tensor) -> dict[int, Prefix]:
    """Prompts (layers, B or 1, 2·L, width) → layer: (first half for keys, second for values), views."""
    half = prompts.shape[2] // 2
    return {layer: (prompt[:, :half], prompt[:, half:]) for layer, prompt in zip(layers, prompts, strict=True)}


def orthogonal_rows(earlier: Tensor, count: int) -> Tensor:
    """`count` random unit rows, orthogonal to the rows of `earlier` (n, d) and to each other: (count, d).

    Gram–Schmidt by one QR, [earlierᵀ, randomᵀ] = Q R: the columns of Q after the first n, with the signs of R's
    diagonal undone. It is exact to rounding where earlier rows nearly coincide, unlike the textbook loop. When
    n + count > d, only d − n rows can be orthogonal; the rest are random unit rows.
    """
    size = earlier.shape[1]
    drawn = torch.randn(count, size, dtype=torch.float64).to(earlier.device)
    room = max(0, min(count, size - len(earlier)))
    rows = normalize(drawn, dim=1)
    if room:
        stacked = torch.cat([earlier.double(), drawn[:room]])
        q, r = torch.linalg.qr(stacked.T)
        rows[:room] = (q * r.diagonal().sign()).T[len(earlier) :]
    return rows.to(earlier.dtype)

"""Visual prompts: what L2P, DualPrompt and CODA-Prompt share.

A frozen tower is steered by learnt vectors, put among its tokens (L2P) or in front of a layer's keys and values (prefix
tuning, DualPrompt and CODA-Prompt). Which vectors a picture gets is decided by its query: its feature from the same
tower without prompts, so a picture's prompts depend on that picture alone.
"""

from __future__ import annotations

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
    """Which prompts each picture gets: similarity (B, N) → the `count` nearest keys, (B, count) int64.

    `together`: the batch votes and all its pictures get the winners (the reference's "batchwise" choice). For training
    alone: at test time it would let one picture's answer depend on the others in its batch.
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
    """Those of `layers` that a tower of `depth` layers has, in order, each once.

    The papers name layers of a ViT-B with 12 layers; a shallower tower gets prompts at the layers it has.
    """
    return [layer for layer in dict.fromkeys(layers) if layer < depth]


def missing_note(layers: Sequence[int], depth: int) -> list[str]:
    """A remark for reports where `existing` has dropped layers."""
    missing = [str(layer) for layer in dict.fromkeys(layers) if layer >= depth]
    return [f"the tower has {depth} layers: no prompts at layer {', '.join(missing)}"] if missing else []


def prefixes(layers: Sequence[int], prompts: Tensor) -> dict[int, Prefix]:
    """Prompts (layers, B or 1, 2·L, width) → layer: (keys, values), each (B or 1, L, width), views.

    The first half of a prompt goes to the keys, the second to the values.
    """
    half = prompts.shape[2] // 2
    return {layer: (prompt[:, :half], prompt[:, half:]) for layer, prompt in zip(layers, prompts, strict=True)}


def orthogonal_rows(earlier: Tensor, count: int) -> Tensor:
    """`count` random unit rows, orthogonal to the rows of `earlier` (n, d) and to each other: (count, d).

    Gram–Schmidt by one QR: [earlierᵀ, randomᵀ] = Q R, and the columns of Q after the first n are the random rows with
    all that came before taken out. Householder's QR keeps them orthogonal to rounding, also where earlier rows nearly
    coincide, where the textbook loop does not. The sign of R's diagonal is undone, so that a row keeps its sign.

    d dimensions hold no more than d orthogonal rows. When n + count > d, the first d − n rows are as above and the rest
    are random unit rows: in d dimensions their cosines with anything are about 1/√d. (The reference code would never
    stop drawing.)
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

"""The layers of the text tower over texts of different lengths, with nothing computed for padding.

The tokens of all texts lie one after the other: projections, norms and the MLP take all of them at once, and attention
takes texts of one length together. The last layer computes the end tokens alone. Attention is causal, so a beginning
that the texts share has the same keys and values in each of them, layer by layer: it is computed once. All of this is
exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clipcil.clip.layers import Attention, Block


def end_states(
    blocks: Sequence[Block], groups: Sequence[Tensor], ends: Sequence[Tensor], beginning: Tensor | None = None
) -> Tensor:
    """What the layers make of the end token of each text.

    Args:
        blocks: Layers of the tower; there may be none.
        groups: Texts of one length each, (n_i, L_i, width), with positions added.
        ends: Where each text of a group ends, (n_i,); what stands after it is padding.
        beginning: (1, P, width), with positions added: tokens in front of every text. Default: none.

    Returns:
        (Σ n_i, width), in the order of the groups.
    """
    shapes = [(int(group.shape[0]), int(group.shape[1])) for group in groups]
    own = torch.cat([group.flatten(0, 1) for group in groups])  # (T, width)
    start = 0 if beginning is None else int(beginning.shape[1])
    steps = torch.arange(start + max(length for _, length in shapes), device=own.device)
    masks: list[Tensor | None] = [None] * len(groups)  # causal
    if start:  # a token sees the beginning and what stands before it: (L, P + L)
        masks = [steps[: start + length] <= steps[start : start + length, None] for _, length in shapes]
    for block in blocks[:-1]:
        own = own + _attend(block, own, shapes, masks, beginning)
        own = own + block.mlp(block.layer_norm2(own))
        beginning = None if beginning is None else block(beginning, causal=True)
    places = torch.arange(len(own), device=own.device)
    firsts = torch.split(places, [count * length for count, length in shapes])
    at_end = torch.cat([first[::length] + end for first, end, (_, length) in zip(firsts, ends, shapes, strict=True)])
    last = own[at_end]
    for block in blocks[-1:]:
        masks = [
            (steps[: start + length] <= start + end[:, None])[:, None, None]  # (n, 1, 1, P + L)
            for end, (_, length) in zip(ends, shapes, strict=True)
        ]
        last = last + _attend(block, own, shapes, masks, beginning, at_end)
        last = last + block.mlp(block.layer_norm2(last))
    return last


def _attend(
    block: Block,
    own: Tensor,
    shapes: Sequence[tuple[int, int]],
    masks: Sequence[Tensor | None],
    beginning: Tensor | None,
    at: Tensor | None = None,
) -> Tensor:
    """Attention of a layer at all tokens (T, width) of the texts, or at one of each text: (T or N, width).

    `shapes[i]` is the number of texts of group i, which lie one after the other in `own`, and their length; `masks[i]`
    says what its queries see of the beginning and of their own text, None: what stands before them.
    """
    attention: Attention = block.self_attn
    normed = block.layer_norm1(own)
    queries = attention.q_proj(normed if at is None else normed[at])
    keys, values = attention.k_proj(normed), attention.v_proj(normed)
    tokens = [count * length for count, length in shapes]
    asking = tokens if at is None else [count for count, _ in shapes]
    before = None if beginning is None else block.layer_norm1(beginning)
    shared = [] if before is None else [attention.k_proj(before), attention.v_proj(before)]
    mixed = []
    for (count, _), mask, *parts in zip(
        shapes, masks, queries.split(asking), keys.split(tokens), values.split(tokens), strict=True
    ):
        query, key, value = (part.unflatten(0, (count, -1)) for part in parts)  # (n, L or 1, width)
        if shared:
            key, value = (
                torch.cat([common.expand(count, -1, -1), part], dim=1)  # (n, P + L, width)
                for common, part in zip(shared, (key, value), strict=True)
            )
        mixed.append(attention.mix(query, key, value, causal=mask is None, mask=mask).flatten(0, 1))
    out: Tensor = attention.out_proj(torch.cat(mixed))
    return out

"""Texts that begin alike, encoded with the common beginning computed once.

The text tower is causal: what stands before the class name cannot see it. A context shared by all classes, [SOS] V_1 …
V_M, therefore has the same keys and values in every class, layer by layer. They are computed for one row; each class
adds its own few tokens, which attend to that row and to each other. Names of as many tokens are taken together, so that
nothing is computed for padding, and the last layer computes the end tokens alone. Exact, and with M = 16 about ten
times less work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipcil.clip import CLIP
from clipcil.clip.layers import Block
from clipcil.prompts.text import PromptTexts


def encode_shared(clip: CLIP, texts: PromptTexts, vectors: Tensor) -> Tensor:
    """Vectors (1, M, width), put in front of each of the N names → features (N, dim), not normalised.

    Equal to encoding the N prompts one by one.
    """
    model = clip.text.text_model
    positions = model.embeddings.position_embedding.weight
    prefix = torch.cat([texts.start[:1], vectors], dim=1)
    start = prefix.shape[1]
    prefix = prefix + positions[:start]
    sizes, lengths = zip(*texts.lengths, strict=True)
    rests, ends = (torch.split(part[texts.by_length], list(sizes)) for part in (texts.rest, texts.ends))
    groups = [rest[:, :length] + positions[start : start + length] for rest, length in zip(rests, lengths, strict=True)]
    steps = torch.arange(start + max(lengths), device=prefix.device)
    mask = steps <= steps[start:, None]  # (L, P + L): a token sees the beginning and what stands before it
    blocks = model.encoder.blocks()
    for block in blocks[:-1]:
        attention, before = block.self_attn, block.layer_norm1(prefix)
        keys_values = attention.k_proj(before), attention.v_proj(before)
        for place, (own, length) in enumerate(zip(groups, lengths, strict=True)):
            normed = block.layer_norm1(own)
            own = own + attention(normed, normed, keys_values, mask=mask[:length, : start + length])
            groups[place] = own + block.mlp(block.layer_norm2(own))
        prefix = block(prefix, causal=True)
    last = [_at_end(own, end - start, prefix, blocks[-1:]) for own, end in zip(groups, ends, strict=True)]
    features: Tensor = clip.text.text_projection(model.final_layer_norm(torch.cat(last)[texts.by_length.argsort()]))
    return features


def _at_end(own: Tensor, ends: Tensor, prefix: Tensor, blocks: list[Block]) -> Tensor:
    """The last layer (a tower may have none) at the end tokens alone, (n, width): only these are read after it."""
    rows, start = torch.arange(len(own), device=own.device), prefix.shape[1]
    last = own[rows, ends]
    for block in blocks:
        before, normed = block.layer_norm1(prefix), block.layer_norm1(own)
        attention = block.self_attn
        keys_values = attention.k_proj(before), attention.v_proj(before)
        steps = torch.arange(start + own.shape[1], device=own.device)
        mask = (steps <= start + ends[:, None])[:, None, None]  # (n, 1, 1, P + L)
        last = last + attention(normed[rows, ends][:, None], normed, keys_values, mask=mask)[:, 0]
        last = last + block.mlp(block.layer_norm2(last))
    return last

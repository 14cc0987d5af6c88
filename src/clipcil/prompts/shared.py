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
    groups = [
        rows[:, :length] + positions[start : start + length]
        for rows, length in zip(torch.split(texts.rest[texts.by_length], list(sizes)), lengths, strict=True)
    ]
    steps = torch.arange(start + max(lengths), device=prefix.device)
    mask = steps <= steps[start:, None]  # (L, P + L): a token sees the beginning and what stands before it
    blocks = model.encoder.blocks()
    for block in blocks:
        attention, before = block.self_attn, block.layer_norm1(prefix)
        keys_values = attention.k_proj(before), attention.v_proj(before)
        for place, (own, length) in enumerate(zip(groups, lengths, strict=True)):
            normed = block.layer_norm1(own)
            first = length - 1 if block is blocks[-1] else 0  # after the last layer the end token alone is read
            own = own[:, first:] + attention(
                normed[:, first:], normed, keys_values, mask=mask[first:length, : start + length]
            )
            groups[place] = own + block.mlp(block.layer_norm2(own))
        prefix = block(prefix, causal=True)
    last = torch.cat([own[:, -1] for own in groups])[texts.by_length.argsort()]
    features: Tensor = clip.text.text_projection(model.final_layer_norm(last))
    return features

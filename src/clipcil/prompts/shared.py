"""Texts that begin alike, encoded with the common beginning computed once.

The text tower is causal: what stands before the class name cannot see it. A context shared by all classes, [SOS] V_1 …
V_M, therefore has the same keys and values in every class, layer by layer. They are computed for one row; each class
adds its own few tokens, which attend to that row and to each other. Exact, and with M = 16 about five times less work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipcil.clip import CLIP


def encode_shared(clip: CLIP, beginning: Tensor, rest: Tensor, ends: Tensor) -> Tensor:
    """Embeddings without positions: beginning (1, P, width), rest (N, L, width), end positions (N,) in the whole text
    → features (N, dim), not normalised. Equal to encoding the N texts `beginning + rest` one by one.

    `rest` is not cut here: the tokenizer pads to the longest text, and reading `ends` would synchronise with a GPU."""
    model, start = clip.text.text_model, beginning.shape[1]
    length = start + rest.shape[1]
    positions = model.embeddings.position_embedding.weight
    prefix, own = beginning + positions[:start], rest + positions[start:length]
    steps = torch.arange(length, device=rest.device)
    mask = steps <= steps[start:, None]  # (L, P + L): a token sees the beginning and what stands before it
    for block in model.encoder.blocks():
        attention, before = block.self_attn, block.layer_norm1(prefix)
        keys_values = attention.k_proj(before), attention.v_proj(before)
        normed = block.layer_norm1(own)
        own = own + attention(normed, normed, keys_values, mask=mask)
        own = own + block.mlp(block.layer_norm2(own))
        prefix = block(prefix, causal=True)
    last = own[torch.arange(len(own), device=own.device), ends - start]
    features: Tensor = clip.text.text_projection(model.final_layer_norm(last))
    return features

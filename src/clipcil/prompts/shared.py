"""Texts with a common beginning, which is encoded once.

The text tower is causal: tokens before the class name do not depend on it. A context shared by all classes, [SOS] V_1 …
V_M, therefore has the same keys and values in every class, and only the few tokens of the names are each class's own
(`clip/ragged.py`). Exact, and with M = 16 about ten times less work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipcil.clip import CLIP
from clipcil.clip.ragged import end_states
from clipcil.prompts.text import PromptTexts


def encode_shared(clip: CLIP, texts: PromptTexts, vectors: Tensor) -> Tensor:
    """Vectors (1, M, width), put in front of each of the N names → features (N, dim), not normalised.

    Equal to encoding the N prompts one by one.
    """
    model = clip.text.text_model
    positions = model.embeddings.position_embedding.weight
    beginning = torch.cat([texts.start[:1], vectors], dim=1)
    start = beginning.shape[1]
    counts = [count for count, _ in texts.lengths]
    rests, ends = (torch.split(part[texts.by_length], counts) for part in (texts.rest, texts.ends - start))
    groups = [
        rest[:, :length] + positions[start : start + length]
        for rest, (_, length) in zip(rests, texts.lengths, strict=True)
    ]
    last = end_states(model.encoder.blocks(), groups, ends, beginning + positions[:start])
    features: Tensor = clip.text.text_projection(model.final_layer_norm(last[texts.by_length.argsort()]))
    return features

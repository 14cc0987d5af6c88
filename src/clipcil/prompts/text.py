"""Soft text prompts: learnt vectors in front of a class name.

Eq. (2) of the paper scores pictures against f_t([SOS] V_1 … V_M name [EOS]); only the vectors V get gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clipcil.clip import CLIP
from clipcil.distributed import spread
from clipcil.errors import UserError


def tokenize_names(clip: CLIP, names: Sequence[str], length: int, suffix: str = "") -> tuple[Tensor, Tensor]:
    """Tokens (N, L) of the names and their ends (N,); refuses a name that leaves no room for `length` vectors."""
    ids, ends = clip.tokenizer([name + suffix for name in names])
    context = clip.config.text.context
    if length + 2 >= context:  # two tokens mark beginning and end, and a name needs at least one
        raise UserError(f"a prompt of {length} vectors does not fit the {context} tokens of the text tower; take fewer")
    longest, name = int(ends.max()), names[int(ends.argmax())]
    if longest + length >= context:
        room = f"the text tower has room for {context - length - 2} beside a prompt of {length}"
        raise UserError(f"class name '{name}' is {longest - 1} tokens long, {room}; shorten the name")
    return ids, ends


class PromptTexts(nn.Module):
    """The fixed part of soft prompts: token embeddings of `[SOS]` and of `name [EOS]` for each class."""

    start: Tensor
    rest: Tensor
    ends: Tensor

    def __init__(self, clip: CLIP, names: Sequence[str], length: int, suffix: str = "") -> None:
        super().__init__()
        ids, ends = tokenize_names(clip, names, length, suffix)
        device = clip.logit_scale.device
        with torch.no_grad():
            embedded = clip.text.embed(ids.to(device))
        # Not in checkpoints: the names tell it.
        self.register_buffer("start", embedded[:, :1].clone(), persistent=False)  # (N, 1, width)
        self.register_buffer("rest", embedded[:, 1:].clone(), persistent=False)  # (N, L−1, width)
        self.register_buffer("ends", ends.to(device) + length, persistent=False)  # (N,)

    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors (N or 1, M, width) → embeddings (N, 1+M+L−1, width) and end positions (N,)."""
        vectors = vectors.expand(len(self.start), -1, -1)
        return torch.cat([self.start, vectors, self.rest], dim=1), self.ends


def encode_prompts(clip: CLIP, prompts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Encode several groups of (embeddings, ends) in one pass: (ΣN, dim), not normalised."""
    longest = max(int(embeddings.shape[1]) for embeddings, _ in prompts)
    padded = [nn.functional.pad(embeddings, (0, 0, 0, longest - embeddings.shape[1])) for embeddings, _ in prompts]
    # The tokenizer pads to the longest name, so the longest prompt ends at `longest`.
    return spread(
        lambda embeddings, ends: clip.text(embeddings, ends, longest),
        torch.cat(padded),
        torch.cat([ends for _, ends in prompts]),
    )


def encode_shared(clip: CLIP, texts: PromptTexts, vectors: Tensor) -> Tensor:
    """Encode prompts that share their vectors: vectors (1, M, width) before each of N names → (N, dim), not normalised.

    The common beginning [SOS] V_1 … V_M is encoded once (`clip/text.py`): with M = 16 about ten times less work.
    """
    beginning = torch.cat([texts.start[:1], vectors], dim=1)
    return clip.text(texts.rest, texts.ends - beginning.shape[1], texts.rest.shape[1], beginning)

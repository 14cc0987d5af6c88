"""The text tower: causal, fed with embeddings so that prompts can be learnt, cut where the texts end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clipcil.clip.config import TextConfig
from clipcil.clip.layers import Block, Encoder, embedding
from clipcil.clip.ragged import end_states
from clipcil.errors import UserError


class TextEmbeddings(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.token_embedding = embedding(config.vocab, config.width)
        self.position_embedding = embedding(config.context, config.width)


class TextModel(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.embeddings = TextEmbeddings(config)
        self.encoder = Encoder(config.layers, config.width, config.heads, config.mlp, config.activation, config.eps)
        self.final_layer_norm = nn.LayerNorm(config.width, eps=config.eps)


class TextTower(nn.Module):
    """`state_dict` keys are those of Hugging Face's CLIPModel: `text_model.*`, `text_projection.weight`."""

    def __init__(self, config: TextConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        self.text_model = TextModel(config)
        self.text_projection = nn.Linear(config.width, dim, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids (N, L) → token embeddings (N, L, width), without positions."""
        embedded: Tensor = self.text_model.embeddings.token_embedding(ids)
        return embedded

    def forward(self, embeddings: Tensor, ends: Tensor, length: int | None = None) -> Tensor:
        """Embeddings (N, L, width) and end-of-text positions (N,) → features (N, dim), not normalised.

        Attention is causal: what stands after a text's end-of-text token cannot reach it. So all work after the longest
        end is left out, on a CPU all work after each text's own end, and the last layer computes the end tokens alone;
        all of it is exact.

        transformers looks for the end in the ids: the first end-of-text id, or, where an old config says
        `eos_token_id: 2`, the largest id. Here the caller passes it, because a soft prompt has no ids; for what
        `Tokenizer` returns all three agree.

        length: the longest end + 1, from a caller who knows it: reading it from `ends` would synchronise with a GPU.
        """
        if embeddings.shape[0] == 0:
            return embeddings.new_zeros(0, self.text_projection.out_features)
        length = int(ends.max()) + 1 if length is None else length
        if length > self.config.context:
            raise UserError(
                f"a prompt of {length} tokens does not fit the context of {self.config.context}; shorten it"
            )
        model = self.text_model
        hidden = embeddings[:, :length] + model.embeddings.position_embedding.weight[:length]
        blocks = model.encoder.blocks()
        last = without_padding(blocks, hidden, ends) if hidden.device.type == "cpu" else padded(blocks, hidden, ends)
        features: Tensor = self.text_projection(model.final_layer_norm(last))
        return features


def without_padding(blocks: Sequence[Block], hidden: Tensor, ends: Tensor) -> Tensor:
    """Tokens (N, L, width) and ends (N,) → the layers' output at the ends (N, width), texts of one length together."""
    order = ends.argsort(stable=True)
    by_length = [(tokens, count) for tokens, count in enumerate(torch.bincount(ends + 1).tolist()) if count]
    texts, lasts = (torch.split(part[order], [count for _, count in by_length]) for part in (hidden, ends))
    groups = [text[:, :tokens] for text, (tokens, _) in zip(texts, by_length, strict=True)]
    return end_states(blocks, groups, lasts)[order.argsort()]


def padded(blocks: Sequence[Block], hidden: Tensor, ends: Tensor) -> Tensor:
    """The same in one piece: on a GPU many small steps take longer than padding, and reading `ends` would wait."""
    for block in blocks[:-1]:
        hidden = block(hidden, causal=True)
    if blocks:
        return blocks[-1].at(hidden, ends, causal=True)
    return hidden[torch.arange(len(ends), device=ends.device), ends]

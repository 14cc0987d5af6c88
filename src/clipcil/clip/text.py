"""The text tower: causal, fed with embeddings so that prompts can be learnt; nothing is computed for padding.

On a CPU the tokens of all texts are one long row: projections, norms and the MLP take it at once, and attention takes
texts of one length together. The last layer computes the end tokens alone. Attention is causal, so a beginning that all
texts share has the same keys and values in each of them and is computed once. All of this is exact.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clipcil.clip.config import TextConfig
from clipcil.clip.layers import Block, Encoder, Linear, embedding
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
        self.encoder = Encoder(config)
        self.final_layer_norm = nn.LayerNorm(config.width, eps=config.eps)


class TextTower(nn.Module):
    """`state_dict` keys are those of Hugging Face's CLIPModel: `text_model.*`, `text_projection.weight`."""

    def __init__(self, config: TextConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        self.text_model = TextModel(config)
        self.text_projection = Linear(config.width, dim, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids (N, L) → token embeddings (N, L, width), without positions."""
        return self.text_model.embeddings.token_embedding(ids)

    def forward(
        self, embeddings: Tensor, ends: Tensor, length: int | None = None, beginning: Tensor | None = None
    ) -> Tensor:
        """Embeddings (N, L, width), without positions → features (N, dim), not normalised.

        `ends` (N,) are the places of the end-of-text tokens in L; nothing after them is computed. `length` is the
        longest end + 1, where the caller knows it: reading it from `ends` would wait for a GPU. `beginning` are the
        embeddings (1, P, width) of tokens in front of every text.
        """
        if embeddings.shape[0] == 0:
            return embeddings.new_zeros(0, self.text_projection.out_features)
        length = int(ends.max()) + 1 if length is None else length
        start = 0 if beginning is None else beginning.shape[1]
        end = start + length
        if end > self.config.context:
            raise UserError(f"a prompt of {end} tokens is longer than the context, {self.config.context}; shorten it")
        model = self.text_model
        positions = model.embeddings.position_embedding.weight
        hidden = embeddings[:, :length] + positions[start:end]
        beginning = None if beginning is None else beginning + positions[:start]
        states = without_padding if hidden.device.type == "cpu" else padded
        last = states(model.encoder.blocks(), hidden, ends, beginning)
        return self.text_projection(model.final_layer_norm(last))


def without_padding(blocks: Sequence[Block], hidden: Tensor, ends: Tensor, beginning: Tensor | None = None) -> Tensor:
    """Tokens (N, L, width) and ends (N,) → the layers' output at the ends (N, width), texts of one length together.

    `beginning` (1, P, width) are tokens in front of every text.
    """
    order = ends.argsort(stable=True)
    by_length = [(tokens, count) for tokens, count in enumerate(torch.bincount(ends + 1).tolist()) if count]
    texts, lasts = (torch.split(part[order], [count for _, count in by_length]) for part in (hidden, ends))
    groups = [text[:, :tokens] for text, (tokens, _) in zip(texts, by_length, strict=True)]
    return end_states(blocks, groups, lasts, beginning)[order.argsort()]


def padded(blocks: Sequence[Block], hidden: Tensor, ends: Tensor, beginning: Tensor | None = None) -> Tensor:
    """The same with padding: on a GPU many small steps take longer, and reading `ends` would wait."""
    return end_states(blocks, [hidden], [ends], beginning)


def end_states(
    blocks: Sequence[Block], groups: Sequence[Tensor], ends: Sequence[Tensor], beginning: Tensor | None = None
) -> Tensor:
    """The layers' output at the ends of all texts, (Σ n_i, width).

    `groups` are texts padded to one length each, (n_i, L_i, width), which end at `ends`, (n_i,). `beginning`
    (1, P, width) are tokens in front of every text. Both include positions.
    """
    shapes = [(int(group.shape[0]), int(group.shape[1])) for group in groups]
    own = torch.cat([group.flatten(0, 1) for group in groups])  # (T, width)
    start = 0 if beginning is None else int(beginning.shape[1])
    steps = torch.arange(start + max(length for _, length in shapes), device=own.device)
    masks: list[Tensor | None] = [None] * len(groups)  # causal
    if start:  # a token sees the beginning and the tokens before it: (L, P + L)
        masks = [steps[: start + length] <= steps[start : start + length, None] for _, length in shapes]
    for block in blocks[:-1]:
        own = own + _attend(block, own, shapes, masks, beginning)
        own = own + block.mlp(block.layer_norm2(own))
        beginning = None if beginning is None else block(beginning, causal=True)
    places = torch.arange(len(own), device=own.device)
    firsts = torch.split(places, [count * length for count, length in shapes])
    at_end = torch.cat([first[::length] + end for first, end, (_, length) in zip(firsts, ends, shapes, strict=True)])
    masks = [
        (steps[: start + length] <= start + end[:, None])[:, None, None]  # (n, 1, 1, P + L)
        for end, (_, length) in zip(ends, shapes, strict=True)
    ]
    block = blocks[-1]
    last = own[at_end] + _attend(block, own, shapes, masks, beginning, at_end)
    return last + block.mlp(block.layer_norm2(last))


def _attend(
    block: Block,
    own: Tensor,
    shapes: Sequence[tuple[int, int]],
    masks: Sequence[Tensor | None],
    beginning: Tensor | None,
    at: Tensor | None = None,
) -> Tensor:
    """Attention of a layer at all tokens `own` (T, width), or at the rows `at`, one of each text: (T or N, width).

    `shapes` are number and length of the texts of each group; `own` holds the groups one after the other. `masks` say
    which tokens of the beginning and of their text the queries of a group see; None: those before them.
    """
    attention = block.self_attn
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
    return attention.out_proj(torch.cat(mixed))

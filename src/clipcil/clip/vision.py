"""The vision tower: CLIP's ViT with room for extra tokens and per-layer key/value prefixes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clipcil.clip.config import VisionConfig
from clipcil.clip.layers import Encoder, Linear, Prefix, embedding, linear

INNER_BLOCKS = 2
"""Blocks at the end of a plain ViT whose inputs are `levels`. Chosen on held-out training pictures (docs/beyond.md)."""


class VisionOutput(NamedTuple):
    tokens: Tensor
    """(B, 1 + L + N, width): the last layer's tokens, before any norm; (B, 1, width) with `class_only`."""
    pooled: Tensor
    """(B, width): the class token after `post_layernorm`."""
    features: Tensor
    """(B, dim): `pooled` projected into the joint space, not normalised."""
    levels: Tensor
    """(B, sum of `level_sizes`): the picture at several depths, the last one `pooled`. Before it come averages of inner
    layers of the trunk or, without a trunk, the class token and the average patch token that the last blocks read."""


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel, computed as one matrix product (faster on a CPU, backward too)."""

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.weight = nn.Parameter(torch.zeros(width, channels, patch, patch))

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, C, H, W) → (B, N, width); rows and columns left over at the end are dropped, as a convolution does."""
        patch = self.patch
        high, wide = pixels.shape[-2] // patch, pixels.shape[-1] // patch
        pixels = pixels[..., : high * patch, : wide * patch]
        batch, channels = pixels.shape[:2]
        squares = pixels.reshape(batch, channels, high, patch, wide, patch)
        flat = squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (B, N, C·p·p)
        return linear(flat, self.weight.flatten(1))


class VisionEmbeddings(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.zeros(config.width))
        self.patch_embedding = PatchEmbedding(config.channels, config.width, config.patch_size)
        self.position_embedding = embedding(1 + config.patches, config.width)

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, C, H, W) → (B, 1 + N, width)."""
        patches = self.patch_embedding(pixels)
        first = self.class_embedding.expand(patches.shape[0], 1, -1)
        embedded: Tensor = torch.cat([first, patches], dim=1) + self.position_embedding.weight
        return embedded


class VisionModel(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(config)
        self.pre_layrnorm = nn.LayerNorm(config.width, eps=config.eps)  # the spelling in the weight files
        self.encoder = Encoder(config)
        self.post_layernorm = nn.LayerNorm(config.width, eps=config.eps)


class VisionTower(nn.Module):
    """`state_dict` keys are those of Hugging Face's CLIPModel: `vision_model.*`, `visual_projection.weight`.

    Where the backbone has a trunk, its last part comes before them, as `start.*`.
    """

    def __init__(self, config: VisionConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        self.vision_model = VisionModel(config)
        self.visual_projection = Linear(config.width, dim, bias=False)
        self.start: nn.Module = nn.Identity()
        self.inner: tuple[int, ...] = ()  # sizes of the trunk's averages, packed behind the channels of the config

    def _load_from_state_dict(self, tensors: dict[str, Tensor], prefix: str, *how: Any) -> None:
        """Towers tuned by 0.2.0, which left the whole trunk frozen, have no `start`: it stays as it is."""
        for name, value in self.start.state_dict(prefix=f"{prefix}start.").items():
            tensors.setdefault(name, value)
        super()._load_from_state_dict(tensors, prefix, *how)

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Number of values of each of the `levels`."""
        width, blocks = self.config.width, min(INNER_BLOCKS, self.config.layers)
        return (*(self.inner or 2 * blocks * (width,)), width)

    def forward(
        self,
        pixels: Tensor,
        extra_tokens: Tensor | None = None,
        prefixes: Mapping[int, Prefix] | None = None,
        class_only: bool = False,
    ) -> VisionOutput:
        """pixels (B, C, H, W), as `Preprocess` makes them → tokens, pooled, features, levels.

        extra_tokens: (B or 1, L, width), placed after the class token once positions were added, before `pre_layrnorm`.
        prefixes: layer index → (keys, values), each (B or 1, L, width), placed in front of that layer's own keys and
            values after their projections.
        class_only: the last layer computes its class token only (a fifth less work in a tower of 4 layers). Pooled and
            features are the same; `tokens` holds that one token.
        """
        return self.encode(self.start(pixels), extra_tokens, prefixes, class_only)

    def encode(
        self,
        pixels: Tensor,
        extra_tokens: Tensor | None = None,
        prefixes: Mapping[int, Prefix] | None = None,
        class_only: bool = False,
    ) -> VisionOutput:
        """`forward` after `start`: the transformer. Channels after those of the config hold the trunk's averages."""
        model = self.vision_model
        pixels, packed = pixels[:, : self.config.channels], pixels[:, self.config.channels :]
        hidden = model.embeddings(pixels)
        if extra_tokens is not None:
            extra = extra_tokens.expand(hidden.shape[0], -1, -1)
            hidden = torch.cat([hidden[:, :1], extra, hidden[:, 1:]], dim=1)
        hidden = model.pre_layrnorm(hidden)
        blocks = model.encoder.blocks()
        prefixes = prefixes or {}
        if unknown := [layer for layer in prefixes if not 0 <= layer < len(blocks)]:
            raise IndexError(f"prefix for layer {unknown[0]} of a tower with {len(blocks)} layers")
        read = []
        for layer, block in enumerate(blocks):
            if not self.inner and layer >= len(blocks) - INNER_BLOCKS:
                normed = block.layer_norm1(hidden)
                read += [normed[:, 0], normed[:, -self.config.patches :].mean(1)]
            if class_only and layer == len(blocks) - 1:
                hidden = block.at(hidden, 0, prefixes.get(layer)).unsqueeze(1)
            else:
                hidden = block(hidden, prefixes.get(layer))
        pooled = model.post_layernorm(hidden[:, 0])
        levels = [packed.flatten(1)[:, : sum(self.inner)], *read, pooled]
        return VisionOutput(hidden, pooled, self.visual_projection(pooled), torch.cat(levels, dim=1))

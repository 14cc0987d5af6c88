"""The dimensions of a CLIP model, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from clipcil.limits import LONGEST_SIDE, MOST_TOKENS
from clipcil.settings import typed

Size = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
"""The bound, far above every CLIP, refuses a damaged config before towers are built."""
TokenId = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Side = Annotated[int, Field(ge=1, le=LONGEST_SIDE)]
HUGGING_FACE = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp": "intermediate_size",
    "activation": "hidden_act",
    "eps": "layer_norm_eps",
    "channels": "num_channels",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "pad": "pad_token_id",
    "vision": "vision_config",
    "text": "text_config",
    "dim": "projection_dim",
}
"""Hugging Face's names of the fields below, where they differ."""
_NAMES = ConfigDict(alias_generator=lambda name: HUGGING_FACE.get(name, name), populate_by_name=True)


@dataclass(frozen=True, config=_NAMES)
class TowerConfig:
    """The fields of both towers, with the defaults of transformers."""

    width: Size = 768
    layers: Annotated[int, Field(ge=1, le=1000)] = 12
    heads: Size = 12
    mlp: Size = 3072
    activation: Literal["quick_gelu", "gelu"] = "quick_gelu"
    eps: Annotated[float, Field(ge=0, le=1)] = 1e-5

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} cannot be divided among {self.heads} heads")
        return self


@dataclass(frozen=True, config=_NAMES)
class VisionConfig(TowerConfig):
    """The vision tower: a ViT over `channels × image_size × image_size`, cut into `patch_size` squares."""

    channels: Size = 3
    image_size: Side = 224
    patch_size: Side = 32

    @model_validator(mode="after")
    def _patches_fit(self) -> Self:
        if self.patch_size > self.image_size:
            raise ValueError(f"patches of {self.patch_size} do not fit into pictures of {self.image_size}")
        return self

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, config=_NAMES)
class TextConfig(TowerConfig):
    """The text tower: a causal transformer over at most `context` tokens."""

    width: Size = 512
    heads: Size = 8
    mlp: Size = 2048
    vocab: Size = 49408
    context: Size = 77
    bos: TokenId = 49406
    eos: TokenId = 49407
    pad: TokenId = 49407


@dataclass(frozen=True, config=_NAMES)
class CLIPConfig:
    vision: VisionConfig
    text: TextConfig
    dim: Size = 512
    """Size of the joint space."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> CLIPConfig:
        """From the content of a `config.json`, with transformers' defaults for missing values.

        The sections `text_config_dict` and `vision_config_dict` of old files take precedence, as in transformers.
        """
        typed(raw.get("model_type", "clip"), Literal["clip"], "model_type")
        table = {"projection_dim": raw.get("projection_dim", 512)}
        for name in ("vision_config", "text_config"):
            merged = {**(raw.get(name) or {}), **(raw.get(f"{name}_dict") or {})}
            table[name] = {key: value for key, value in merged.items() if value is not None}
        config: CLIPConfig = typed(table, cls)
        return config

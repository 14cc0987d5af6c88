"""The dimensions of a CLIP model, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clipcil.errors import UserError, nearest

ACTIVATIONS = ("quick_gelu", "gelu")
LARGEST, MOST_LAYERS = 10**6, 1000
"""Far above every CLIP there is, and small enough that a damaged config is refused before towers are built from it."""


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower: a ViT over `channels × image_size × image_size`, cut into `patch_size` squares."""

    width: int = 768
    layers: int = 12
    heads: int = 12
    mlp: int = 3072
    activation: str = "quick_gelu"
    eps: float = 1e-5
    channels: int = 3
    image_size: int = 224
    patch_size: int = 32

    def __post_init__(self) -> None:
        _check("vision_config", self)
        if not 1 <= self.patch_size <= self.image_size:
            raise UserError(f"vision_config: patch_size {self.patch_size} does not fit image_size {self.image_size}")

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class TextConfig:
    """The text tower: a causal transformer over at most `context` tokens."""

    width: int = 512
    layers: int = 12
    heads: int = 8
    mlp: int = 2048
    activation: str = "quick_gelu"
    eps: float = 1e-5
    vocab: int = 49408
    context: int = 77
    bos: int = 49406
    eos: int = 49407
    pad: int = 49407

    def __post_init__(self) -> None:
        _check("text_config", self)


@dataclass(frozen=True)
class CLIPConfig:
    vision: VisionConfig
    text: TextConfig
    dim: int = 512
    """Size of the joint space."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> CLIPConfig:
        """From the content of a `config.json` of `model_type` "clip"; what it leaves out has transformers' default.

        Old files carry `text_config_dict` / `vision_config_dict` beside the newer sections; where both name a key the
        `_dict` one counts, as in transformers.
        """
        kind = raw.get("model_type", "clip")
        if kind != "clip":
            raise UserError(f"config.json is of a '{kind}' model; clipcil reads model_type 'clip'")
        vision = VisionConfig(**_section(raw, "vision_config", VisionConfig, _VISION_KEYS))
        text = TextConfig(**_section(raw, "text_config", TextConfig, _TEXT_KEYS))
        return cls(vision, text, _value("projection_dim", raw.get("projection_dim", 512), 512))


_COMMON_KEYS = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "mlp",
    "hidden_act": "activation",
    "layer_norm_eps": "eps",
}
_VISION_KEYS = {**_COMMON_KEYS, "num_channels": "channels", "image_size": "image_size", "patch_size": "patch_size"}
_TEXT_KEYS = {
    **_COMMON_KEYS,
    "vocab_size": "vocab",
    "max_position_embeddings": "context",
    "bos_token_id": "bos",
    "eos_token_id": "eos",
    "pad_token_id": "pad",
}


def _section(raw: Mapping[str, Any], name: str, kind: type, keys: Mapping[str, str]) -> dict[str, Any]:
    tables = [raw.get(key) or {} for key in (name, f"{name}_dict")]
    if not all(isinstance(table, Mapping) for table in tables):
        raise UserError(f"config.json: {name} holds no table; copy it again from the backbone")
    given = {key: value for key, value in {**tables[0], **tables[1]}.items() if value is not None and key in keys}
    return {keys[key]: _value(f"{name}.{key}", value, getattr(kind, keys[key])) for key, value in given.items()}


def _value(name: str, value: Any, default: Any) -> Any:
    """A value of the type of `default`; numbers are bounded, so that a damaged config takes no memory."""
    if type(value) is int and isinstance(default, float):
        value = float(value)
    if type(value) is not type(default) or not (isinstance(value, str) or 0 <= value <= LARGEST):
        needed = "a text" if isinstance(default, str) else f"a number from 0 to {LARGEST}"
        raise UserError(f"config.json: {name} is {value!r}; {needed} is needed there")
    return value


def _check(section: str, config: VisionConfig | TextConfig) -> None:
    if config.activation not in ACTIVATIONS:
        known = nearest(config.activation, ACTIVATIONS)
        raise UserError(f"{section}: hidden_act '{config.activation}' is not one CLIP uses{known}")
    if config.heads < 1 or config.width % config.heads:
        raise UserError(f"{section}: width {config.width} cannot be divided among {config.heads} heads")
    if config.layers > MOST_LAYERS:
        raise UserError(f"{section}: {config.layers} layers are more than any CLIP has; the config is damaged")

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
        _check("vision_config", self.width, self.heads, self.layers, self.activation)
        if not 1 <= self.patch_size <= self.image_size:
            raise UserError(
                f"vision_config: patch_size {self.patch_size} does not fit image_size {self.image_size};"
                " the config is inconsistent"
            )

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
        _check("text_config", self.width, self.heads, self.layers, self.activation)


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
        return cls(
            vision=VisionConfig(**_section(raw, "vision_config", _VISION_KEYS)),
            text=TextConfig(**_section(raw, "text_config", _TEXT_KEYS)),
            dim=_number("projection_dim", raw.get("projection_dim", 512), int),
        )


_COMMON_KEYS: dict[str, tuple[str, type]] = {
    "hidden_size": ("width", int),
    "num_hidden_layers": ("layers", int),
    "num_attention_heads": ("heads", int),
    "intermediate_size": ("mlp", int),
    "hidden_act": ("activation", str),
    "layer_norm_eps": ("eps", float),
}
_VISION_KEYS = _COMMON_KEYS | {
    "num_channels": ("channels", int),
    "image_size": ("image_size", int),
    "patch_size": ("patch_size", int),
}
_TEXT_KEYS = _COMMON_KEYS | {
    "vocab_size": ("vocab", int),
    "max_position_embeddings": ("context", int),
    "bos_token_id": ("bos", int),
    "eos_token_id": ("eos", int),
    "pad_token_id": ("pad", int),
}


def _section(raw: Mapping[str, Any], name: str, keys: Mapping[str, tuple[str, type]]) -> dict[str, Any]:
    tables = [raw.get(key) or {} for key in (name, f"{name}_dict")]
    if not all(isinstance(table, Mapping) for table in tables):
        raise UserError(f"config.json: {name} holds no table; copy it again from the backbone")
    section = {**tables[0], **tables[1]}
    found = {}
    for theirs, (ours, kind) in keys.items():
        value = section.get(theirs)
        if value is not None:
            found[ours] = str(value) if kind is str else _number(f"{name}.{theirs}", value, kind)
    return found


def _number(name: str, value: Any, kind: type) -> Any:
    allowed = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, allowed) or not 0 <= value <= LARGEST:
        raise UserError(f"config.json: {name} is {value!r}; a number from 0 to {LARGEST} is needed there")
    return kind(value)


def _check(section: str, width: int, heads: int, layers: int, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise UserError(f"{section}: hidden_act '{activation}' is not one CLIP uses{nearest(activation, ACTIVATIONS)}")
    if heads < 1 or width % heads:
        raise UserError(f"{section}: width {width} cannot be shared by {heads} heads; the config is inconsistent")
    if layers > MOST_LAYERS:
        raise UserError(f"{section}: {layers} layers are more than any CLIP has; the config is damaged")

"""open_clip's weights (LAION and others): OpenAI's tensor names in safetensors, beside an `open_clip_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from clipcil.clip import openai
from clipcil.clip.config import CLIPConfig
from clipcil.clip.preprocess import Steps
from clipcil.clip.weights import read_json
from clipcil.errors import UserError

CONFIG = "open_clip_config.json"
WEIGHTS = ("open_clip_model.safetensors", "model.safetensors")
_UNREAD = {
    "vision_cfg": ("timm_model_name", "attentional_pool", "ls_init_value", "no_ln_pre", "pos_embed_type", "pool_type"),
    "text_cfg": ("hf_model_name", "embed_cls", "ls_init_value", "no_causal_mask", "pool_type"),
}
_USUAL = {"pool_type": ("tok", "argmax"), "pos_embed_type": ("learnable",)}


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `open_clip_config.json`, or nothing where there is none."""
    path = folder / CONFIG
    return read_json(path) if path.is_file() else {}


def make_config(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> CLIPConfig:
    """Shapes come from the tensors (`to_hf` names), the rest from the file.

    The activation is in no tensor. open_clip's models, LAION's among them, use GELU, except configs that say
    `quick_gelu`; without a config file the name decides: `…quickgelu…` in it means QuickGELU.
    """
    model = raw.get("model_cfg") or {}
    for section, keys in _UNREAD.items():
        settings = model.get(section) or {}
        for key in keys:
            if settings.get(key) and settings[key] not in _USUAL.get(key, ()):
                raise UserError(
                    f"{name}: {section}.{key} = {settings[key]!r} is not CLIP's plain ViT; use another backbone"
                )
    lowered = name.lower().replace("_", "").replace("-", "")
    quick = bool(model["quick_gelu"]) if "quick_gelu" in model else "quickgelu" in lowered
    config = openai.config_from_shapes(tensors, "quick_gelu" if quick else "gelu", name)
    vision, text = model.get("vision_cfg") or {}, model.get("text_cfg") or {}
    heads = config.vision.width // int(vision.get("head_width", config.vision.width // config.vision.heads))
    return CLIPConfig(
        replace(config.vision, heads=heads),
        replace(config.text, heads=int(text.get("heads", config.text.heads))),
        config.dim,
    )


def make_steps(raw: Mapping[str, Any], image_size: int) -> Steps:
    """open_clip's evaluation preprocessing: as OpenAI's, with the mean, std and resize mode the file names."""
    settings = raw.get("preprocess_cfg") or {}
    steps = Steps.plain(image_size)
    mode = settings.get("resize_mode", "shortest")
    if mode not in ("shortest", "squash"):
        raise UserError(f"{CONFIG}: resize_mode '{mode}' is not read; known: shortest, squash")
    if mode == "squash":
        steps = replace(steps, short_side=None, exact=steps.crop)
    interpolation = settings.get("interpolation", "bicubic")
    if interpolation not in ("bicubic", "random"):
        raise UserError(f"{CONFIG}: interpolation '{interpolation}' is not read; known: bicubic")
    return replace(steps, mean=tuple(settings.get("mean") or steps.mean), std=tuple(settings.get("std") or steps.std))

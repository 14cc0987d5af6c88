"""open_clip's weights (LAION and others): OpenAI's tensor names in safetensors, beside an `open_clip_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from clipcil.clip import openai
from clipcil.clip.config import CLIPConfig
from clipcil.clip.preprocess import Steps
from clipcil.errors import UserError

CONFIG = "open_clip_config.json"
_NOT_READ = {
    "vision_cfg": ("timm_model_name", "attentional_pool", "ls_init_value", "no_ln_pre", "pos_embed_type", "pool_type"),
    "text_cfg": ("hf_model_name", "embed_cls", "ls_init_value", "no_causal_mask", "pool_type"),
    "preprocess_cfg": ("resize_mode", "interpolation"),
}
"""Settings of other models than CLIP's plain ViT, which must be off or have one of the values below."""
_READ = {
    "pool_type": ("tok", "argmax"),
    "pos_embed_type": ("learnable",),
    "resize_mode": ("shortest", "squash"),
    "interpolation": ("bicubic", "random"),
}


def make_config(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> CLIPConfig:
    """Shapes come from the renamed tensors, the rest from the content of the file.

    The activation is in no tensor. open_clip's models, LAION's among them, use GELU, except configs that say
    `quick_gelu`; without a config file the name decides: `…quickgelu…` in it means QuickGELU.
    """
    model = raw.get("model_cfg") or {}
    for section, keys in _NOT_READ.items():
        settings = (model if section in model else raw).get(section) or {}
        for key in keys:
            if settings.get(key) and settings[key] not in _READ.get(key, ()):
                raise UserError(f"{section}.{key} = {settings[key]!r} is not CLIP's plain ViT; use another backbone")
    quick = model.get("quick_gelu", "quickgelu" in name.lower().replace("_", "").replace("-", ""))
    config = openai.config_from_shapes(tensors, "quick_gelu" if quick else "gelu")
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
    if settings.get("resize_mode") == "squash":
        steps = replace(steps, short_side=None, exact=steps.crop)
    return replace(steps, mean=settings.get("mean") or steps.mean, std=settings.get("std") or steps.std)

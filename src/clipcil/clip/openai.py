"""OpenAI's own weight files (`ViT-B-16.pt`), and open_clip's (LAION and others), which have the same tensor names.

open_clip's are safetensors beside an `open_clip_config.json`. OpenAI's are TorchScript archives, which hold code:
`torch.jit.load` gets only files whose SHA-256 OpenAI published. Every other `.pt` file must be a plain state dict, read
by `torch.load(weights_only=True)`, which makes tensors and nothing else. Before torch 2.6 that function could be made
to run code (CVE-2025-32434), so it is not used there.
"""

import math
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import InstanceOf, TypeAdapter
from torch import Tensor

from clipcil.clip.config import CLIPConfig
from clipcil.clip.preprocess import Steps
from clipcil.errors import UserError, first_line
from clipcil.settings import typed
from clipcil.storage import sha256

OPEN_CLIP_CONFIG = "open_clip_config.json"
PUBLISHED = {  # OpenAI put each file's sha256 into its address
    "40d365715913c9da98579312b702a82c18be219cc2a73407c4526f58eba950af": "ViT-B-32.pt",
    "5806e77cd80f8b59890b7e101eabd078d9fb84e6937f9e85e4ecb61988df416f": "ViT-B-16.pt",
    "b8cca3fd41ae0c99ba7e8951adf17d267cdb84cd88be6f7c2e0eca1737a03836": "ViT-L-14.pt",
    "3035c92b350959924f9f00213499208652fc7ea050643e8b385c2dac08641f02": "ViT-L-14-336px.pt",
}
_HEAD_WIDTH = 64  # of every ViT that OpenAI published, and of open_clip's whose config names no other
_NOT_WEIGHTS = ("input_resolution", "context_length", "vocab_size", "attn_mask")
_PREFIXES = re.compile(r"^(module\.)?(text\.)?")  # of DistributedDataParallel, and of open_clip's later models
_NAMES = {
    r"^visual\.transformer\.resblocks": "vision_model.encoder.layers",
    r"^transformer\.resblocks": "text_model.encoder.layers",
    r"\.ln_(\d)\.": r".layer_norm\1.",
    r"\.attn\.": ".self_attn.",
    r"\.mlp\.c_fc\.": ".mlp.fc1.",
    r"\.mlp\.c_proj\.": ".mlp.fc2.",
    r"^visual\.ln_pre": "vision_model.pre_layrnorm",
    r"^visual\.ln_post": "vision_model.post_layernorm",
    r"^visual\.class_embedding": "vision_model.embeddings.class_embedding",
    r"^visual\.conv1": "vision_model.embeddings.patch_embedding",
    r"^visual\.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    r"^visual\.proj$": "visual_projection.weight",
    r"^ln_final": "text_model.final_layer_norm",
    r"^token_embedding": "text_model.embeddings.token_embedding",
    r"^positional_embedding": "text_model.embeddings.position_embedding.weight",
    r"^text_projection$": "text_projection.weight",
}
"""Hugging Face's names for parts of OpenAI's."""
_PLAIN_VIT: dict[str, tuple[str, ...]] = {
    "pool_type": ("tok", "argmax"),
    "pos_embed_type": ("learnable",),
    "resize_mode": ("shortest", "squash"),
    "interpolation": ("bicubic", "random"),
    **dict.fromkeys(("timm_model_name", "attentional_pool", "no_ln_pre", "ls_init_value"), ()),
    **dict.fromkeys(("hf_model_name", "embed_cls", "no_causal_mask"), ()),
}
"""open_clip's settings of other models than CLIP's plain ViT: each must be off or have one of these values."""


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.pt` or `pytorch_model.bin` file, under the names they have there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about TorchScript
            if sha256(path) in PUBLISHED:
                return dict(torch.jit.load(str(path), map_location="cpu").state_dict())  # type: ignore[no-untyped-call]
            if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
                raise RuntimeError(f"torch {torch.__version__} cannot read it safely; torch 2.6 can")
            size = path.stat().st_size
            if zipfile.is_zipfile(path) and sum(part.file_size for part in zipfile.ZipFile(path).infolist()) > size:
                raise ValueError("the archive is compressed")  # it could unpack to any size
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        found = TypeAdapter(dict[str, InstanceOf[Tensor]]).validate_python(dict(loaded.get("state_dict", loaded)))
        # Views of one small tensor could be copied to any size; sparse, nested and meta tensors have no plain numbers.
        plain = all(each.is_cpu and each.layout == torch.strided and not each.is_nested for each in found.values())
        if not plain or sum(each.nbytes for each in found.values()) > size:
            raise ValueError("its tensors are not plain numbers of the file")
        return found
    except Exception as error:  # a damaged archive can raise anything
        raise UserError(
            f"{path} is cut, or no plain state dict ({first_line(error)}); use OpenAI's own file, or safetensors"
        ) from error


def looks_like(names: Mapping[str, object]) -> bool:
    """Whether the names are OpenAI's or open_clip's."""
    return any(_PREFIXES.sub("", name).startswith(("visual.", "transformer.resblocks.")) for name in names)


def rename(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names and layout of Hugging Face. Unknown names stay as they are, so that an error can name them."""
    renamed: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        theirs = name = _PREFIXES.sub("", full)
        for pattern, replacement in _NAMES.items():
            name = re.sub(pattern, replacement, name)
        if fused := re.fullmatch(r"(.+)\.in_proj_(weight|bias)", name):
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"{fused[1]}.{part}_proj.{fused[2]}"] = piece
        elif theirs in ("visual.proj", "text_projection"):
            renamed[name] = tensor.t()
        elif theirs not in _NOT_WEIGHTS:
            renamed[name] = tensor.reshape(()) if name == "logit_scale" else tensor
    return renamed


def make_config(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> CLIPConfig:
    """The config of renamed tensors, from their shapes and from `settings`, the content of `open_clip_config.json`.

    No tensor tells the activation. open_clip's models, LAION's among them, use GELU, except where the config says
    `quick_gelu`; without a config, where the name of the backbone contains `quickgelu`.
    """
    model = settings.get("model_cfg") or {}
    for section in ("vision_cfg", "text_cfg", "preprocess_cfg"):
        found = (model if section in model else settings).get(section) or {}
        for key, allowed in _PLAIN_VIT.items():
            if found.get(key) and found[key] not in allowed:
                raise UserError(f"{section}.{key} = {found[key]!r} is not CLIP's plain ViT; use another backbone")
    try:
        _, channels, patch, _ = tensors["vision_model.embeddings.patch_embedding.weight"].shape
        places = tensors["vision_model.embeddings.position_embedding.weight"].shape[0]
        vocab, _ = tensors["text_model.embeddings.token_embedding.weight"].shape
        context = tensors["text_model.embeddings.position_embedding.weight"].shape[0]
        vision, text = (_shared(tensors, tower) for tower in ("vision_model", "text_model"))
        dim = tensors["text_projection.weight"].shape[0]
    except (KeyError, ValueError) as error:
        raise UserError(f"it holds no CLIP with a ViT tower ({error}); clipcil reads ViTs") from error
    quick = model.get("quick_gelu", "quickgelu" in name.lower().replace("_", "").replace("-", ""))
    vision["activation"] = text["activation"] = "quick_gelu" if quick else "gelu"
    if "head_width" in (model.get("vision_cfg") or {}):
        vision["heads"] = vision["width"] // int(model["vision_cfg"]["head_width"])
    if "heads" in (model.get("text_cfg") or {}):
        text["heads"] = int(model["text_cfg"]["heads"])
    side = math.isqrt(places - 1) * patch
    vision |= {"channels": channels, "image_size": side, "patch_size": patch}
    config: CLIPConfig = typed(
        {"vision": vision, "text": {**text, "vocab": vocab, "context": context}, "dim": dim}, CLIPConfig
    )
    return config


def _shared(tensors: Mapping[str, Tensor], tower: str) -> dict[str, Any]:
    """The fields of `TowerConfig` that shapes tell. The number of heads follows from the usual width of a head."""
    mlp, width = tensors[f"{tower}.encoder.layers.0.mlp.fc1.weight"].shape
    layers = {name.split(".")[3] for name in tensors if name.startswith(f"{tower}.encoder.layers.")}
    return {"width": width, "layers": len(layers), "heads": max(width // _HEAD_WIDTH, 1), "mlp": mlp}


def make_steps(settings: Mapping[str, Any], image_size: int) -> Steps:
    """open_clip's evaluation preprocessing: OpenAI's, with the mean, std and resize mode of the settings."""
    found = settings.get("preprocess_cfg") or {}
    steps = Steps.plain(image_size)
    if found.get("resize_mode") == "squash":
        steps = replace(steps, short_side=None, exact=steps.crop)
    changed: Steps = typed({**asdict(steps), **{key: found[key] for key in ("mean", "std") if found.get(key)}}, Steps)
    return changed

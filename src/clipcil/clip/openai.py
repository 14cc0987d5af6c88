"""OpenAI's own weight files (`ViT-B-16.pt`) and their tensor names, which open_clip shares.

How the file is read. The published file is a TorchScript archive. `torch.load(weights_only=True)` refuses those, and
`torch.jit.load` builds modules with code from the archive. That code runs only when it is called, which never happens
here; still, a stranger's archive is not opened at all: only a file whose sha256 is one OpenAI published goes to
`torch.jit.load`. Every other `.pt` must be a plain state dict, read by `torch.load(weights_only=True)`, which makes
tensors and nothing else (before torch 2.6 that had a hole, CVE-2025-32434, so there it is refused).
"""

from __future__ import annotations

import math
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from clipcil.clip.config import CLIPConfig, TextConfig, VisionConfig
from clipcil.errors import UserError, first_line
from clipcil.storage import sha256

PUBLISHED = {  # OpenAI put each file's sha256 into its address
    "40d365715913c9da98579312b702a82c18be219cc2a73407c4526f58eba950af": "ViT-B-32.pt",
    "5806e77cd80f8b59890b7e101eabd078d9fb84e6937f9e85e4ecb61988df416f": "ViT-B-16.pt",
    "b8cca3fd41ae0c99ba7e8951adf17d267cdb84cd88be6f7c2e0eca1737a03836": "ViT-L-14.pt",
    "3035c92b350959924f9f00213499208652fc7ea050643e8b385c2dac08641f02": "ViT-L-14-336px.pt",
}
_NOT_WEIGHTS = ("input_resolution", "context_length", "vocab_size", "attn_mask")
_HEAD_WIDTH = 64  # of every ViT OpenAI published; the files do not say it

_TOP = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.proj": "visual_projection.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "text_projection": "text_projection.weight",
    "logit_scale": "logit_scale",
}
_NORMS = {
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "ln_final": "text_model.final_layer_norm",
}
_INNER = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}
_TRANSPOSED = ("visual.proj", "text_projection")
_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)")


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.pt` or `pytorch_model.bin` file, under the names they have there."""
    try:
        if _is_torchscript(path):
            if sha256(path) not in PUBLISHED:
                raise UserError(
                    f"{path} is a TorchScript archive (code), and its sha256 is not one OpenAI published; "
                    "use OpenAI's ViT-B-16.pt, or the weights as safetensors"
                )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # newer torch calls TorchScript deprecated
                return dict(torch.jit.load(str(path), map_location="cpu").state_dict())  # type: ignore[no-untyped-call]
        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
            raise UserError(f"{path}: torch {torch.__version__} cannot read such a file safely; use torch 2.6 or newer")
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # a damaged archive raises whatever the byte it breaks at leads to
        message = f"{path} is cut, or holds more than tensors ({first_line(error)}); download it again"
        raise UserError(message) from error
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise UserError(f"{path} holds no plain state dict; save the model's state_dict() and use that file")
    return dict(loaded)


def _is_torchscript(path: Path) -> bool:
    """A zip with a `constants.pkl` is TorchScript; a state dict saved by torch has none."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def looks_like(names: Mapping[str, object]) -> bool:
    """Whether the names are OpenAI's or open_clip's."""
    return any(_plain(name).startswith(("visual.", "transformer.resblocks.")) for name in names)


def _plain(name: str) -> str:
    """Without the prefix that DistributedDataParallel adds, and that of open_clip's models with a `text` module."""
    name = name.removeprefix("module.")
    return name.removeprefix("text.")


def to_hf(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names and layout of Hugging Face: fused q, k, v split; projections transposed.

    Unknown names are kept as they are, so that the check of the weights can name them.
    """
    renamed: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        name = _plain(full)
        if name in _NOT_WEIGHTS:
            continue
        if name in _TOP:
            renamed[_TOP[name]] = tensor.t() if name in _TRANSPOSED else tensor
        elif match := _BLOCK.fullmatch(name):
            tower = "vision_model" if match[1] else "text_model"
            block = f"{tower}.encoder.layers.{match[2]}"
            inner, _, kind = match[3].rpartition(".")
            if match[3] in ("attn.in_proj_weight", "attn.in_proj_bias"):
                kind = match[3].rpartition("_")[2]
                for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                    renamed[f"{block}.self_attn.{part}_proj.{kind}"] = piece
            else:
                renamed[f"{block}.{_INNER.get(inner, inner)}.{kind}"] = tensor
        else:
            layer, _, kind = name.rpartition(".")
            renamed[f"{_NORMS[layer]}.{kind}" if layer in _NORMS else name] = tensor
    if (scale := renamed.get("logit_scale")) is not None:
        renamed["logit_scale"] = scale.reshape(())
    return renamed


def config_from_shapes(tensors: Mapping[str, Tensor], activation: str, source: str) -> CLIPConfig:
    """The config of `to_hf` tensors; only the head width is not in the shapes: 64, as in all of OpenAI's."""
    try:
        width, channels, patch, _ = tensors["vision_model.embeddings.patch_embedding.weight"].shape
        positions = tensors["vision_model.embeddings.position_embedding.weight"].shape[0]
        vocab, text_width = tensors["text_model.embeddings.token_embedding.weight"].shape
        context = tensors["text_model.embeddings.position_embedding.weight"].shape[0]
        dim = tensors["text_projection.weight"].shape[0]
        vision_mlp = tensors["vision_model.encoder.layers.0.mlp.fc1.weight"].shape[0]
        text_mlp = tensors["text_model.encoder.layers.0.mlp.fc1.weight"].shape[0]
    except (KeyError, ValueError) as error:
        raise UserError(f"{source}: no CLIP with a ViT tower in it (looked for {error}); clipcil reads ViTs") from error
    return CLIPConfig(
        VisionConfig(
            width=width,
            layers=_layers(tensors, "vision_model"),
            heads=max(width // _HEAD_WIDTH, 1),
            mlp=vision_mlp,
            activation=activation,
            channels=channels,
            image_size=math.isqrt(positions - 1) * patch,
            patch_size=patch,
        ),
        TextConfig(
            width=text_width,
            layers=_layers(tensors, "text_model"),
            heads=max(text_width // _HEAD_WIDTH, 1),
            mlp=text_mlp,
            activation=activation,
            vocab=vocab,
            context=context,
        ),
        dim,
    )


def _layers(tensors: Mapping[str, Tensor], tower: str) -> int:
    return len({name.split(".")[3] for name in tensors if name.startswith(f"{tower}.encoder.layers.")})

"""Towers, trunk and tokenizer as one folder that clipcil and transformers load; the reference for the tests."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import TypeAdapter
from safetensors.torch import save_file
from torch import Tensor

from clipcil.clip import CLIP
from clipcil.clip.config import CLIPConfig, TextConfig, VisionConfig
from clipcil.clip.loading import MINI
from reproduce.mini.lite import Lite
from reproduce.mini.vision import SCALE

_REFERENCE_TEXTS = ["a photo of a octopus", "a photo of an apple", "a photo of a pickup truck"]
_REFERENCE_TEXTS += ["Café, naïve 3D — a photo of 2 dogs!"]


def write(
    folder: Path,
    lite: Lite,
    reduce: tuple[Tensor, Tensor],
    vision: tuple[VisionConfig, dict[str, Tensor]],
    text: tuple[TextConfig, dict[str, Tensor]],
    dim: int,
) -> None:
    """Write the folder, with the tokenizer of the embedded backbone. Weights are stored in half precision."""
    folder.mkdir(parents=True, exist_ok=True)
    towers = vision[1] | text[1] | {"logit_scale": torch.tensor(SCALE).log()}
    save_file(_half(towers), folder / "model.safetensors", {"format": "pt"})
    kernel, bias = lite.head
    trunk = lite.tensors | {"head.weight": kernel[:, :, None, None], "head.bias": bias}
    trunk |= {"reduce.weight": reduce[0][:, :, None, None], "reduce.bias": reduce[1]}
    save_file(_half(trunk), folder / "trunk.safetensors")
    spec = lite.spec | {"head": {"out": len(bias)}, "reduce": {"out": len(reduce[1])}}
    for name, table in {"trunk.json": spec, "config.json": _config(CLIPConfig(vision[0], text[0], dim))}.items():
        (folder / name).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MINI / name, folder / name)


def write_reference(clip: CLIP, file: Path, seed: int = 0) -> None:
    """Four made-up pictures and four texts with the output of each stage, for the tests."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    pictures = [Image.fromarray(grid).resize((128, 128), Image.Resampling.BICUBIC) for grid in coarse]
    pixels = torch.from_numpy(np.stack([np.array(picture) for picture in pictures]))
    with torch.no_grad():
        inputs = clip.preprocess(pictures)
        tensors = {
            "pictures_uint8": pixels.permute(0, 3, 1, 2),
            "trunk_output": clip.vision.start(inputs),
            "image_features": clip.vision(inputs).features,
            "token_ids": clip.tokenizer(_REFERENCE_TEXTS)[0],
            "text_features": clip.encode_texts(_REFERENCE_TEXTS),
        }
    metadata = {"texts": json.dumps(_REFERENCE_TEXTS)}
    save_file({name: value.contiguous() for name, value in tensors.items()}, file, metadata)


def _half(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().half().contiguous() for name, tensor in tensors.items()}


def _config(config: CLIPConfig) -> dict[str, Any]:
    """The content of a `config.json` of transformers."""
    table: dict[str, Any] = TypeAdapter(CLIPConfig).dump_python(config, by_alias=True)
    for kind in ("text", "vision"):
        table[f"{kind}_config"] |= {"model_type": f"clip_{kind}_model", "projection_dim": config.dim}
    return {"architectures": ["CLIPModel"], "model_type": "clip", **table}

"""A tiny CLIP with random weights for tests that need towers but no knowledge."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from clipcil.clip import CLIP
from clipcil.clip.config import CLIPConfig, TextConfig, VisionConfig
from clipcil.clip.loading import MINI
from clipcil.clip.preprocess import Preprocess, Steps
from clipcil.clip.tokenizer import Tokenizer
from clipcil.clip.vision import PatchEmbedding

REFERENCE = Path(__file__).parent / "data" / "reference.safetensors"


def make_tiny_clip(
    seed: int = 0,
    activation: str = "quick_gelu",
    width: int = 32,
    layers: int = 2,
    heads: int = 4,
    dim: int = 24,
    image_size: int = 16,
    patch_size: int = 8,
    context: int = 48,
) -> CLIP:
    """Our CLIP over 3 × `image_size`² pixels with the mini tokenizer; random weights, none of them zero."""
    tokenizer = Tokenizer.from_folder(MINI, context)
    config = CLIPConfig(
        VisionConfig(
            width=width,
            layers=layers,
            heads=heads,
            mlp=2 * width,
            activation=activation,
            image_size=image_size,
            patch_size=patch_size,
        ),
        TextConfig(
            width=width,
            layers=layers,
            heads=heads,
            mlp=2 * width,
            activation=activation,
            vocab=8192,
            context=context,
            bos=tokenizer.bos,
            eos=tokenizer.eos,
            pad=tokenizer.eos,
        ),
        dim,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        clip = CLIP(config, tokenizer, Preprocess(Steps.plain(image_size)), f"tiny-{seed}")
        for module in clip.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, 0.2)
                nn.init.normal_(module.bias, 0.0, 0.2)
            elif isinstance(module, nn.Embedding | PatchEmbedding):
                nn.init.normal_(module.weight, 0.0, 0.3)
        nn.init.normal_(clip.vision.vision_model.embeddings.class_embedding, 0.0, 0.3)
    return clip.freeze()

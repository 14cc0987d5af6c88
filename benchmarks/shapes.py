"""Towers of the shapes that the benchmarks name, with random weights: speed does not depend on the weights."""

import torch
from torch import nn

from clipcil.clip import CLIP
from clipcil.clip.config import CLIPConfig, TextConfig, VisionConfig
from clipcil.clip.loading import MINI
from clipcil.clip.preprocess import Preprocess, Steps
from clipcil.clip.tokenizer import Tokenizer
from clipcil.clip.vision import PatchEmbedding

B16_VISION = VisionConfig(patch_size=16)
B16_TEXT = TextConfig(vocab=8192)  # the vocabulary of the embedded tokenizer; the table is only looked up
SMALL_VISION = VisionConfig(width=64, layers=1, heads=1, mlp=64, image_size=16, patch_size=16)
"""For benchmarks that use only the text tower."""
SMALL_TEXT = TextConfig(width=64, layers=1, heads=1, mlp=64, vocab=8192)
MINI_TEXT = TextConfig(width=192, layers=4, heads=3, mlp=768, vocab=8192, activation="gelu", context=48)


def random_clip(vision: VisionConfig, text: TextConfig, dim: int = 512, seed: int = 0) -> CLIP:
    """A frozen CLIP of these shapes, with the embedded tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = Tokenizer.from_folder(MINI, text.context)
        config = CLIPConfig(vision, text, dim)
        clip = CLIP(config, tokenizer, Preprocess(Steps.plain(vision.image_size)), "random")
        for module in clip.modules():
            if isinstance(module, nn.Embedding | PatchEmbedding):
                nn.init.normal_(module.weight, 0.0, 0.02)
        nn.init.normal_(clip.vision.vision_model.embeddings.class_embedding, 0.0, 0.02)
    return clip.freeze()


def names(count: int) -> list[str]:
    """Class names of two to four tokens, as those of the usual datasets have."""
    first = ("red", "small", "wild", "old", "sea", "night", "field", "stone", "paper", "garden")
    last = ("fox", "boat", "apple", "tower", "bird", "train", "chair", "flower", "clock", "shark")
    pairs = [f"{a} {b}" for a in first for b in last]
    return [f"{pairs[index % 100]} {index // 100 or ''}".strip() for index in range(count)]

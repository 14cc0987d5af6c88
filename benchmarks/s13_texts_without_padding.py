"""S13: a step of soft prompts in front of names of different lengths: padded to the longest, or without padding."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.harness import Row, alternate, difference, versus
from benchmarks.shapes import names
from clipcil.clip import load_clip
from clipcil.clip.text import padded
from clipcil.data.dataset import open_dataset
from clipcil.prompts.text import PromptTexts, encode_prompts


def run(quick: bool) -> list[Row]:
    count = 10 if quick else 100
    drawn = names(4 * count)  # pairs of words
    mixed = [" ".join(drawn[4 * i : 4 * i + 2]).rsplit(" ", i % 4)[0] for i in range(count)]  # one to four words
    return [
        measure("names of emoji", open_dataset("emoji").classes[:count], quick),
        measure("mixed names", mixed, quick),
    ]


def measure(what: str, classes: Sequence[str], quick: bool) -> Row:
    """Forward and backward of the prompts of these classes, M = 10, on the embedded backbone."""
    torch.manual_seed(0)
    clip = load_clip("mini")
    texts = PromptTexts(clip, classes, 10)
    prompts = nn.Parameter(0.02 * torch.randn(len(classes), 10, clip.config.text.width))
    direction = torch.randn(len(classes), clip.config.dim)

    def ours() -> Tensor:
        (gradient,) = torch.autograd.grad((encode_prompts(clip, [texts(prompts)]) * direction).sum(), prompts)
        return gradient

    def theirs() -> Tensor:
        with patch("clipcil.clip.text.without_padding", padded):
            return ours()

    tokens = (texts.ends + 1).float()
    step = (
        f"prompt step, {len(classes)} {what}, {tokens.mean():.1f} tokens each and {tokens.max():.0f} at most, on mini"
    )
    seconds = alternate({"theirs": theirs, "ours": ours}, 1 if quick else 25)
    return versus("S13", step, seconds, error=difference(ours(), theirs()), tolerance=1e-5)

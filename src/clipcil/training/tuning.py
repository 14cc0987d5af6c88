"""Which parts of a vision tower are trained: everything, the last blocks, the layer norms, the projection, or LoRA."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from clipcil.clip import CLIP
from clipcil.clip.vision import VisionTower
from clipcil.errors import UserError

Tuned = Literal["tower", "blocks", "norms", "projection", "lora"]


@contextmanager
def tuned(clip: CLIP, what: Tuned, blocks: int = 2, rank: int = 8) -> Iterator[list[nn.Parameter]]:
    """Tune the vision tower of `clip` inside this block.

    When the block ends, low-rank updates are merged into the weights they belong to, and the tower is marked as
    changed, so that features cached from the tower before are not used again.

    Args:
        clip: The backbone, with a vision tower of its own.
        what: Which parameters are trained.
        blocks: Number of last blocks, for `what="blocks"`.
        rank: Rank of the update, for `what="lora"`.

    Yields:
        The parameters to train.
    """
    tower, depth = clip.vision, clip.vision.config.layers
    if what == "blocks" and not 1 <= blocks <= depth:
        raise UserError(f"tuned_blocks is {blocks}; the tower has {depth} blocks, so give 1 to {depth}")
    after = ("vision_model.post_layernorm", "visual_projection")
    last = tuple(f"vision_model.encoder.layers.{i}." for i in range(depth - blocks, depth))
    starts = {"lora": (), "norms": (), "projection": after[1:], "blocks": last + after, "tower": ("",)}[what]
    named = tower.named_parameters()
    chosen = [p for name, p in named if name.startswith(starts) or (what == "norms" and "norm" in name)]
    layers = [m for name, m in tower.named_modules() if what == "lora" and name.endswith(("q_proj", "v_proj"))]
    for layer in layers:
        update = LowRank(layer.weight, rank)
        parametrize.register_parametrization(layer, "weight", update)
        chosen += [update.down, update.up]
    try:
        yield chosen
    finally:
        for layer in layers:
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
            layer.weight.requires_grad_(False)
        clip.touch()


@torch.no_grad()
def average_with(tower: VisionTower, past: Mapping[str, Tensor], weight: float) -> None:
    """Replace each parameter of the tower by weight · parameter + (1 − weight) · past[name]."""
    for name, value in tower.named_parameters():
        value.copy_(torch.lerp(past[name], value, weight))


class LowRank(nn.Module):
    """W ↦ W + B A with B = 0 at the start (LoRA, https://arxiv.org/abs/2106.09685): A (r, in), B (out, r)."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, weight.shape[1], device=weight.device) / weight.shape[1] ** 0.5)
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down

"""Flips and random crops of the input of a vision tower, for methods that train something inside the tower."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from clipcil.clip.vision import VisionTower
from clipcil.distributed import spread
from clipcil.settings import options
from clipcil.training.trainer import Training

Augment = Literal["none", "flip", "crop"]

AREA = (0.08, 1.0)
"""Share of the picture that a crop covers; torchvision's default for RandomResizedCrop."""
RATIO = (3 / 4, 4 / 3)
"""Width of a crop divided by its height; torchvision's default."""


@options
class TowerTraining(Training):
    """Training of something inside the vision tower, which sees pictures and not only their cached features."""

    augment: Augment = "none"
    """none; flip: left and right are exchanged for half of the pictures; crop: flip, and a random part of 8 to 100 % of
    the picture stretched to its size (RandomResizedCrop). Drawn anew at every step."""


def augmented(pixels: Tensor, how: Augment) -> Tensor:
    """Flip and crop each picture of a batch (B, C, H, W) by itself, with draws from torch's global generator.

    A crop never covers more than the picture, so resampling only enlarges, and bilinear interpolation is enough.
    Augmentation is meant for backbones that read pixels. Where a backbone has a trunk (`mini`), `pixels` are feature
    maps of its frozen part, and flipping these differs from the feature maps of a flipped picture: on the test pictures
    of emoji the cosine of the two features is 0.94, and 0.97 without any flip.
    """
    if how == "none":
        return pixels
    flips = torch.rand(len(pixels)) < 0.5
    if how == "flip":
        return torch.where(flips.to(pixels.device)[:, None, None, None], pixels.flip(3), pixels)
    grid = affine_grid(_crops(flips, pixels.shape[2:]).to(pixels), list(pixels.shape), align_corners=False)
    return grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)


def training_inputs(tower: VisionTower, pixels: Tensor, features: Tensor, how: Augment) -> tuple[Tensor, Tensor]:
    """Training inputs of prompts inside a frozen tower: the pixels (B, C, H, W) of a batch and its queries (B, dim).

    A query is the feature of the picture from the tower without prompts: the cached one of `features` (B, dim), or that
    of the augmented picture, as in the codes of L2P, DualPrompt and CODA-Prompt, which takes one more pass.
    """
    if how == "none":
        return pixels, features
    pixels = augmented(pixels, how)
    with torch.no_grad():
        return pixels, spread(lambda part: tower(part, class_only=True).features, pixels)


def _crops(flips: Tensor, size: torch.Size) -> Tensor:
    """For each picture the affine map (B, 2, 3) from places in the result to places in the picture, in [−1, 1]."""
    count = len(flips)
    area = AREA[0] + (AREA[1] - AREA[0]) * torch.rand(count)
    low, high = torch.tensor(RATIO).log()
    ratio = torch.exp(low + (high - low) * torch.rand(count)) * size[0] / size[1]  # relative to the picture's own
    wide, tall = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    across = (1 - wide) * (2 * torch.rand(count) - 1)  # centres such that the crop stays inside
    down = (1 - tall) * (2 * torch.rand(count) - 1)
    zero = torch.zeros(count)
    mirrored = torch.where(flips, -wide, wide)
    return torch.stack([torch.stack([mirrored, zero, across], 1), torch.stack([zero, tall, down], 1)], 1)

"""A batch of pictures as a method reads it."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

from torch import Tensor

from clipcil.clip import CLIP
from clipcil.clip.vision import VisionOutput


class Batch(Protocol):
    """A batch of B pictures as `Method.logits` reads it. Nothing is computed before a property is read."""

    def __len__(self) -> int: ...

    @property
    def pixels(self) -> Tensor:
        """(B, C, H, W) float32: preprocessed pictures."""

    @property
    def features(self) -> Tensor:
        """(B, dim): raw (not normalised) features of the vision tower as it is now; no gradient."""

    @property
    def pooled(self) -> Tensor:
        """(B, width): the class token before the projection into the joint space."""

    @property
    def levels(self) -> Tensor:
        """(B, sum of the tower's `level_sizes`): features from several depths of the tower; they end with `pooled`."""


class TensorBatch:
    """A batch made of preprocessed pictures that are already a tensor."""

    def __init__(self, clip: CLIP, pixels: Tensor) -> None:
        self._clip, self._pixels = clip, pixels

    def __len__(self) -> int:
        return int(self._pixels.shape[0])

    @property
    def pixels(self) -> Tensor:
        return self._pixels

    @cached_property
    def _encoded(self) -> VisionOutput:
        output: VisionOutput = self._clip.vision(self._pixels, class_only=True)
        return output

    @property
    def features(self) -> Tensor:
        return self._encoded.features.float()

    @property
    def pooled(self) -> Tensor:
        return self._encoded.pooled.float()

    @property
    def levels(self) -> Tensor:
        return self._encoded.levels.float()

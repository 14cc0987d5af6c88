"""SimpleCIL: the nearest class mean in the frozen feature space. Nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.clip import CLIP
from clipcil.data.reader import Pictures
from clipcil.data.stream import Task
from clipcil.methods.base import Method
from clipcil.methods.registry import register
from clipcil.training.loop import Session


@dataclass(frozen=True)
class SimpleCILConfig:
    """It has no options: there is nothing to train and nothing to choose."""


@register
class SimpleCIL(Method):
    """score(x, c) = cos(v(x), p_c), p_c = mean of v over the training pictures of class c.

    v is the feature after CLIP's projection, not normalised before the mean: as the reference has it, and not the same
    as the mean of unit features. The scores are cosines without a temperature (σ = 1), which changes no prediction.
    """

    name = "simplecil"
    title = "SimpleCIL"
    Config = SimpleCILConfig
    config: SimpleCILConfig
    prototypes: Tensor  # (C, dim): class means, not normalised
    counts: Tensor  # (C,) int64: pictures behind each mean

    def __init__(self, config: SimpleCILConfig, clip: CLIP, session: Session) -> None:
        super().__init__(config, clip, session)
        self.register_buffer("prototypes", torch.zeros(0, clip.config.dim, device=session.device))
        self.register_buffer("counts", torch.zeros(0, dtype=torch.int64, device=session.device))

    def grow(self, names: Sequence[str]) -> None:
        super().grow(names)
        self.prototypes = torch.cat([self.prototypes, self.prototypes.new_zeros(len(names), self.prototypes.shape[1])])
        self.counts = torch.cat([self.counts, self.counts.new_zeros(len(names))])

    def learn(self, task: Task) -> None:
        self.grow(task.names)
        features, labels = task.pictures.features, task.pictures.labels
        prototypes = self.prototypes.clone()
        for label in range(self.seen - self.sizes[-1], self.seen):
            prototypes[label] = features[labels == label].mean(0)
        self.prototypes = prototypes
        self.counts = self.counts + torch.bincount(labels, minlength=self.seen)

    def learn_again(self, task: Task) -> None:
        """The mean of the union: (n p + Σ v) / (n + m), in float64."""
        labels, old = task.pictures.labels, self.counts.double()[:, None]
        added = torch.bincount(labels, minlength=self.seen)
        sums = (old * self.prototypes.double()).index_add(0, labels, task.pictures.features.double())
        means = (sums / (old + added[:, None])).to(self.prototypes)
        self.prototypes = torch.where(added[:, None] > 0, means, self.prototypes)  # the others keep their bits
        self.counts = self.counts + added

    def forget(self, index: int) -> None:
        self.drop_name(index)
        for name in ("prototypes", "counts"):
            value = getattr(self, name)
            setattr(self, name, torch.cat([value[:index], value[index + 1 :]]))

    def logits(self, batch: Pictures) -> Tensor:
        return normalize(batch.features, dim=-1) @ normalize(self.prototypes, dim=-1).T

"""SimpleCIL: the nearest class mean in the frozen feature space. Nothing is trained.

https://arxiv.org/abs/2303.07338
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.data.reader import Batch
from clipcil.data.tasks import Task
from clipcil.methods.base import Method
from clipcil.methods.registry import register
from clipcil.settings import options


@options
class SimpleCILConfig:
    """It has no options: there is nothing to train and nothing to choose."""


@register
class SimpleCIL(Method):
    """score(x, c) = cos(v(x), p_c), p_c = mean of v over the training pictures of class c.

    v is the feature after CLIP's projection, not normalised before the mean. This is as in the reference, and not the
    same as the mean of unit features. The scores are cosines without a temperature (σ = 1), which changes no
    prediction.
    """

    name = "simplecil"
    title = "SimpleCIL"
    Config = SimpleCILConfig
    scores = "cosine"
    keeps = "class means"
    config: SimpleCILConfig
    prototypes: Tensor  # (C, dim): class means, not normalised
    counts: Tensor  # (C,) int64: pictures behind each mean

    def build(self) -> None:
        self.growing_buffer("prototypes", self.dim)
        self.growing_buffer("counts", dtype=torch.int64)

    def learn_task(self, task: Task) -> None:
        features, labels = task.pictures.features, task.pictures.labels
        for label in self.new_labels:
            self.prototypes[label] = features[labels == label].mean(0)
        self.counts = self.counts + torch.bincount(labels, minlength=self.seen)

    def learn_again(self, task: Task) -> None:
        """The mean of the union: (n p + Σ v) / (n + m), in float64."""
        labels, old = task.pictures.labels, self.counts.double()[:, None]
        added = torch.bincount(labels, minlength=self.seen)
        sums = (old * self.prototypes.double()).index_add(0, labels, task.pictures.features.double())
        means = (sums / (old + added[:, None])).to(self.prototypes)
        self.prototypes = torch.where(
            added[:, None] > 0, means, self.prototypes
        )  # the other classes stay bit-identical
        self.counts = self.counts + added

    def forget(self, index: int) -> None:
        self.drop_class(index)

    def logits(self, batch: Batch) -> Tensor:
        return normalize(batch.features, dim=-1) @ normalize(self.prototypes, dim=-1).T

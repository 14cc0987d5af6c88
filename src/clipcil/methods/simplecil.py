"""SimpleCIL (https://arxiv.org/abs/2303.07338): the nearest class mean in the frozen feature space.

    score(x, c) = cos(v(x), p_c),    p_c = mean of v over the training pictures of class c

v is the feature after CLIP's projection, not normalised before the mean, as in the authors' code. Nothing is trained,
and there are no options.

Examples:
    >>> import clipcil
    >>> experiment = clipcil.Experiment("simplecil", data="emoji", tasks=10)
    >>> for task in experiment:
    ...     experiment.learn(task)
    >>> experiment.evaluate().last
    66.5
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.data.reader import Batch
from clipcil.data.tasks import Task
from clipcil.methods.base import Method
from clipcil.methods.registry import register


@register
class SimpleCIL(Method):
    name = "simplecil"
    title = "SimpleCIL"
    scores = "cosine"
    keeps = "class means"
    class_vectors = "prototypes"
    prototypes: Tensor  # (C, dim): class means, not normalised
    counts: Tensor  # (C,) int64: pictures behind each mean

    def build(self) -> None:
        self.growing_buffer("prototypes", self.dim)
        self.growing_buffer("counts", dtype=torch.int64)

    def learn_task(self, task: Task) -> None:
        features, labels = task.pictures.features, task.pictures.labels
        self.prototypes[self.old :] = torch.stack([own.mean(0) for own in self.by_new_class(features, labels)])
        self.counts = self.counts + torch.bincount(labels, minlength=self.seen)

    def learn_again(self, task: Task) -> None:
        """The mean of the union: (n p + Σ v) / (n + m), in float64. The other classes keep their bits."""
        labels, old = task.pictures.labels, self.counts.double()[:, None]
        added = torch.bincount(labels, minlength=self.seen)
        sums = (old * self.prototypes.double()).index_add(0, labels, task.pictures.features.double())
        means = (sums / (old + added[:, None])).to(self.prototypes)
        self.prototypes = torch.where(added[:, None] > 0, means, self.prototypes)
        self.counts = self.counts + added

    def forget(self, index: int) -> None:
        self.drop_class(index)

    def logits(self, batch: Batch) -> Tensor:
        return normalize(batch.features, dim=-1) @ normalize(self.prototypes, dim=-1).T

"""DMC-OT with the truth in the place of a part, to see what stage 1, the map and stage 2 each lose.

for kind in TrueStatistics Closed TrueClosed; do
    clipcil bench --methods reproduce/truth.py:$kind --data cub200 --data-root DIR --orders seed:1993 seed:1 seed:2
done

The true Gaussians are those of all pictures so far, measured again with the tower after stage 1, so these runs are
bounds and not class-incremental. A linear discriminant on the stored Gaussians stands for the best that stage 2 could
do. `--set stage1.epochs=0` leaves out stage 1.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.data.reader import Batch, Pictures
from clipcil.data.tasks import Task
from clipcil.memory.gaussians import GaussianMemory
from clipcil.methods.dmc import DMCOT


class TrueStatistics(DMCOT):
    """The stored Gaussians are measured again instead of transported by Eq. (4)."""

    name, title, presets, bound = "dmc-ot-true", "DMC-OT, true statistics", "dmc-ot", "upper"

    def learn_task(self, task: Task) -> None:
        self.so_far = task.pictures
        super().learn_task(replace(task, pictures=task.pictures[task.pictures.labels >= self.old]))
        del self.so_far

    def calibrate(self, before: list[Tensor], after: list[Tensor]) -> None:
        features, labels = normalize(self.so_far.features, dim=-1).double(), self.so_far.labels
        groups = [features[labels == label] for label in range(self.old)]
        self.memory = GaussianMemory()
        for own in torch.split(torch.arange(self.old), self.sizes[:-1]):
            self.memory.add([groups[label] for label in own.tolist()])


class Closed(DMCOT):
    """A linear discriminant on the stored Gaussians instead of the prompts of stage 2."""

    name, title, presets, class_vectors = "dmc-ot-closed", "DMC-OT, discriminant", "dmc-ot", ""

    def build(self) -> None:
        super().build()
        self.growing_buffer("weight", self.dim)
        self.growing_buffer("bias")

    def train_prompts(self, pictures: Pictures) -> None:
        """Nothing: the discriminant takes their place."""

    @torch.no_grad()
    def store_texts(self, all_classes: bool) -> None:
        """w_c = A⁻¹ μ_c and b_c = −½ μ_cᵀ A⁻¹ μ_c with A the mean of the classes' covariances."""
        means, covariances = zip(*(self.memory.moments(label) for label in range(self.seen)), strict=True)
        centres = torch.stack(means) - torch.stack(means).mean(0)
        weight = torch.linalg.solve(torch.stack(covariances).mean(0), centres.T).T
        self.weight = weight.to(self.weight)
        self.bias = (-0.5 * (weight * (centres + 2 * torch.stack(means).mean(0))).sum(1)).to(self.bias)

    def logits(self, batch: Batch) -> Tensor:
        return normalize(batch.features, dim=-1) @ self.weight.T + self.bias


class TrueClosed(Closed, TrueStatistics):
    """Both: what the features of the tower would allow."""

    name, title = "dmc-ot-true-closed", "DMC-OT, true statistics, discriminant"

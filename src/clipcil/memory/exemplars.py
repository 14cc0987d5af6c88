"""Exemplars: a few training pictures of every class, kept for later tasks.

The methods that keep exemplars have a frozen vision tower, so a picture's feature never changes: keeping the raw
feature is the same as keeping the picture and encoding it again. The budget counts pictures, as the literature does.
"""

from typing import Annotated, Literal

import torch
from pydantic import NonNegativeInt
from torch import Tensor
from torch.nn import functional

from clipcil.memory.rows import SizedByState
from clipcil.settings import options


@options
class Budget:
    """How many pictures may be kept."""

    pictures: NonNegativeInt = 2000
    """Pictures in all, or of each class."""
    per: Literal["dataset", "class"] = "dataset"
    """dataset: `pictures` in all, shared equally among the classes seen, so that old sets shrink as classes come;
    class: `pictures` of each class, whatever the number of classes."""

    def of_each(self, classes: int) -> int:
        """m: pictures of each class when `classes` have been seen; ⌊total / classes⌋ where the total is fixed."""
        return self.pictures if self.per == "class" else self.pictures // max(1, classes)


class ExemplarMemory(SizedByState):
    """Features of the pictures kept, class after class, each class in the order in which herding chose them.

    Herding is greedy: the first m of a longer choice are the choice for m, so a class shrinks by cutting its tail.
    """

    features: Annotated[Tensor, "n d", torch.float32]  # raw, as the tower gave them
    labels: Annotated[Tensor, "n", torch.int64]  # ascending
    classes: Annotated[Tensor, "", torch.int64]  # classes seen, including those of which nothing could be kept

    def __init__(self, dim: int, budget: Budget) -> None:
        super().__init__(d=dim)
        self.budget = budget

    def __len__(self) -> int:
        return len(self.labels)

    def check_state(self) -> None:
        super().check_state()
        ends = torch.cat([self.labels.new_zeros(1), self.labels, self.classes[None] - 1])
        if len(self) and bool((ends.diff() < 0).any()):
            raise ValueError(f"the labels of exemplars are not sorted, or not of the {int(self.classes)} classes seen")

    @torch.no_grad()
    def add(self, features: Tensor, labels: Tensor) -> None:
        """Choose exemplars of new classes, and shrink the old sets to fit the budget.

        Args:
            features: (n, d) raw features of the pictures of a task.
            labels: (n,) their classes, all of them new.
        """
        new = torch.unique(labels)
        self.classes = self.classes + len(new)  # not in place: a state_dict taken earlier must not change
        each = self.budget.of_each(int(self.classes))
        place = torch.arange(len(self), device=self.labels.device) - torch.searchsorted(self.labels, self.labels)
        chosen = [torch.nonzero(labels == label).flatten() for label in new]
        picked = torch.cat([rows[herd(features[rows], each)] for rows in chosen])
        self.features = torch.cat([self.features[place < each], features[picked].to(self.features)])
        self.labels = torch.cat([self.labels[place < each], labels[picked]])

    def join(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """D_k ∪ memory: the pictures of a task, features (n, d) and labels (n,), followed by the exemplars."""
        return torch.cat([features, self.features]), torch.cat([labels, self.labels])


@torch.no_grad()
def herd(features: Tensor, count: int) -> Tensor:
    """Choose pictures of a class whose mean stays close to the mean of the class: iCaRL's greedy choice

        p_k = argmin_x ‖μ − (x + Σ_{j<k} p_j)/k‖    over the rows not chosen yet,

    on L2-normalised features, whose mean is not normalised again. A shorter memory is a prefix of a longer one.

    Args:
        features: (n, d) of one class.
        count: Pictures to keep.

    Returns:
        (min(count, n),) int64: indices of rows, best first.
    """
    unit = functional.normalize(features.detach().double(), dim=1)  # float64: near ties must not depend on rounding
    mean = unit.mean(0)
    # ‖kμ − s − x‖² = ‖kμ − s‖² − 2x·(kμ − s) + ‖x‖², so the nearest row has the largest x·(kμ − s) − ‖x‖²/2.
    toward_mean, half_norm = unit @ mean, unit.square().sum(1) / 2  # (n,), (n,)
    overlap = torch.zeros_like(toward_mean)  # x · s, s = the sum of the rows chosen so far
    taken = torch.zeros_like(toward_mean)  # −∞ at rows already chosen
    chosen = torch.empty(max(0, min(count, len(unit))), dtype=torch.int64, device=unit.device)
    for k in range(len(chosen)):
        best = (toward_mean * (k + 1) - overlap - half_norm + taken).argmax()
        chosen[k] = best
        taken[best] = -torch.inf
        overlap += unit @ unit[best]
    return chosen

"""What the base class does for every method when a lesson ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from clipcil.clip import CLIP
from clipcil.data.reader import Batch
from clipcil.data.tasks import Task
from clipcil.errors import UserError
from clipcil.methods.base import Method, NoConfig
from clipcil.training.trainer import Trainer


class Computed(Method):
    """Keeps what it is given, as a method keeps what it computes after its training; a mask is no part of that."""

    name, title = "computed", "Computed"

    def build(self) -> None:
        self.growing_buffer("classifier", self.dim)
        self.register_buffer("mask", torch.tensor([-torch.inf]), persistent=False)

    def learn_task(self, task: Task) -> None:
        self.classifier = torch.full_like(self.classifier, cast(SimpleNamespace, task.pictures).value)

    def logits(self, batch: Batch) -> torch.Tensor:
        return batch.features @ self.classifier.T


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_lesson_that_leaves_numbers_that_are_not_finite_is_refused(tiny_clip: CLIP, value: float) -> None:
    method = Computed(NoConfig(), tiny_clip, Trainer())
    method.learn(Task(0, ["a"], SimpleNamespace(value=1.0)))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="training diverged: 'classifier' holds a NaN or an infinity"):
        method.learn(Task(1, ["b"], SimpleNamespace(value=value)))  # type: ignore[arg-type]

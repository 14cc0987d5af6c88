"""Joint training (https://arxiv.org/abs/2302.03648): all pictures of all classes seen, from the start at every task.

The upper bound of the field.

    loss = CE(head(v(x)), y; all classes seen)

The stream hands the pictures of earlier tasks to this method alone, so it is not class-incremental. Tower, head and
options are those of `finetune`.

Examples:
    >>> import clipcil
    >>> experiment = clipcil.Experiment("joint", data="emoji", tasks=20)
    >>> experiment.learn(next(iter(experiment)))
    >>> experiment.evaluate().last >= 60  # percent; chance is 20
    True
"""

import torch
from torch import Tensor

from clipcil.data.tasks import Task
from clipcil.errors import UserError
from clipcil.methods.finetune import Finetune
from clipcil.methods.registry import register


@register
class Joint(Finetune):
    name = "joint"
    title = "Joint training"
    keeps = "all pictures"
    bound = "upper"

    def build(self) -> None:
        super().build()
        self.start: list[Tensor] = [value.detach().clone() for value in self.tower.parameters()]

    @torch.no_grad()
    def restart(self) -> None:
        """Give the tower the backbone's weights, and the head zeros."""
        for value, first in zip(self.tower.parameters(), self.start, strict=True):
            value.copy_(first)
        for rows in self.head.parameters():
            rows.zero_()

    def learn_task(self, task: Task) -> None:
        labels = task.pictures.labels
        if len(torch.unique(labels)) < self.seen:
            raise UserError(
                "joint needs the pictures of all classes so far, which only a run hands out; use clipcil run"
            )
        self.restart()
        self.fit(task.pictures, labels, list(self.head.parameters()), self.head)

    def notes(self) -> list[str]:
        return ["an upper bound, not class-incremental: every task brings the pictures of all classes so far"]

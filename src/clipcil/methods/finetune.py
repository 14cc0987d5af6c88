"""Fine-tuning (https://arxiv.org/abs/2302.03648): tower and head learn each task, with nothing against forgetting.

The lower bound of the field.

    loss = CE(head(v(x)), y; classes of the current task)

v is the tower's raw feature, head a linear layer whose rows of earlier tasks stay as they are. Options are those of
C3Box (`models/finetune.py`, `exps/finetune.json`); its weight decay is 2e-4 after the first task and also shrinks the
old rows.

Examples:
    >>> import clipcil
    >>> experiment = clipcil.Experiment("finetune", data="emoji", tasks=20)
    >>> experiment.learn(next(iter(experiment)))
    >>> experiment.evaluate().last >= 60  # percent; chance is 20
    True
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clipcil.data.reader import Batch, Pictures
from clipcil.data.tasks import Task
from clipcil.distributed import spread
from clipcil.heads.linear import GrowingHead
from clipcil.methods.base import Method
from clipcil.methods.registry import register
from clipcil.settings import options
from clipcil.training.augment import TowerTraining, augmented
from clipcil.training.tuning import Tuned, tuned


@options
class FinetuneConfig:
    train: TowerTraining = TowerTraining(
        epochs=10, lr=1e-3, batch_size=128, optimizer="sgd", weight_decay=5e-4, schedule="constant"
    )
    """Training of tower and head in every task."""
    tuned: Tuned = "tower"
    """Part of the tower that trains."""


@register
class Finetune(Method):
    name = "finetune"
    title = "Fine-tuning"
    Config = FinetuneConfig
    tunes_tower = True
    bound: ClassVar[Literal["", "lower", "upper"]] = "lower"
    config: FinetuneConfig

    def build(self) -> None:
        self.tower = self.clip.vision
        self.head = GrowingHead(self.dim, self.device)

    def allocate(self, names: Sequence[str]) -> None:
        self.head.grow(len(names))

    def learn_task(self, task: Task) -> None:
        self.fit(task.pictures, task.pictures.labels - self.old, self.head.newest(), self.head.current)

    def fit(
        self, pictures: Pictures, labels: Tensor, rows: Sequence[nn.Parameter], head: Callable[[Tensor], Tensor]
    ) -> None:
        """Train the tower and `rows` of the head, which scores features (B, dim), on pictures with these labels."""

        def encode(pixels: Tensor) -> Tensor:
            return self.tower(pixels, class_only=True).features

        def loss(chosen: Tensor, batch: Pictures) -> Tensor:
            pixels = augmented(batch.pixels, self.config.train.augment)
            return cross_entropy(head(spread(encode, pixels)), labels[chosen])

        with tuned(self.clip, self.config.tuned) as parameters:
            self.trainer.fit("train", [*parameters, *rows], pictures, loss, self.config.train)

    def logits(self, batch: Batch) -> Tensor:
        return self.head(batch.features)

    def notes(self) -> list[str]:
        return ["a lower bound: nothing is done against forgetting", *self.head.notes()]

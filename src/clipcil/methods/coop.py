"""CoOp with memory (https://arxiv.org/abs/2109.01134): one learnt context in front of every class name.

    score(x, c) = s · cos(v(x), f_t([SOS] V_1 … V_M name_c . [EOS])),    V shared by all classes

V alone is trained, by cross-entropy over all classes seen, on new pictures and exemplars. CoOp was made for one
dataset and has no official class-incremental version; as in the comparisons of this field, the context of the last task
is trained further. Read at KaiyangZhou/CoOp, commit ff61507.
"""

from collections.abc import Sequence

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from clipcil.data.reader import Batch
from clipcil.data.tasks import Task
from clipcil.memory.exemplars import Budget, ExemplarMemory
from clipcil.methods.base import Method
from clipcil.methods.registry import register
from clipcil.prompts.text import PromptTexts, encode_shared, tokenize_names
from clipcil.settings import options
from clipcil.training.trainer import Training


@options
class CoOpConfig:
    """Defaults: CoOp's own values; epochs and memory, which it has not, as in its class-incremental versions."""

    train: Training = Training(
        epochs=10, lr=2e-3, batch_size=32, optimizer="sgd", weight_decay=5e-4, momentum=0.9, warmup=0.1
    )
    """Training of the context. CoOp has 50 to 200 epochs for a few shots; with whole datasets 10 are usual."""
    context_length: PositiveInt = 16
    """M, number of context vectors."""
    context_std: NonNegativeFloat = 0.02
    """Standard deviation of the initial context vectors."""
    suffix: str = "."
    """Text after the class name."""
    memory: Budget = Budget()
    """Exemplars, chosen by herding."""


@register
class CoOp(Method):
    name = "coop"
    title = "CoOp"
    Config = CoOpConfig
    keeps = "exemplars"
    keeps_exemplars = True
    class_vectors = "classifier"
    config: CoOpConfig
    classifier: Tensor  # (C, dim): texts of all classes seen, unit length

    def build(self) -> None:
        self.memory = ExemplarMemory(self.dim, self.config.memory)
        first = torch.randn(1, self.config.context_length, self.clip.config.text.width) * self.config.context_std
        self.context = nn.Parameter(first.to(self.device), requires_grad=False)  # (1, M, width)
        self.class_texts = PromptTexts(self.clip, [""], self.config.context_length)
        self.growing_buffer("classifier", self.dim)

    def check_names(self, names: Sequence[str]) -> None:
        tokenize_names(self.clip, names, self.config.context_length, self.config.suffix)

    def allocate(self, names: Sequence[str]) -> None:
        self.class_texts = PromptTexts(self.clip, self.names, self.config.context_length, self.config.suffix)

    def learn_task(self, task: Task) -> None:
        new, new_labels = task.pictures.features, task.pictures.labels
        features, labels = self.memory.join(new, new_labels)
        features = self.clip.scale * normalize(features, dim=-1)

        def loss(rows: Tensor) -> Tensor:
            return cross_entropy(features[rows] @ self.texts().T, labels[rows])

        self.trainer.fit("train", [self.context], len(labels), loss, self.config.train)
        with torch.no_grad():
            self.classifier = self.texts()
        self.memory.add(new, new_labels)

    def texts(self) -> Tensor:
        """Unit texts of all classes seen, (C, dim), with the current context."""
        return normalize(encode_shared(self.clip, self.class_texts, self.context), dim=-1)

    def logits(self, batch: Batch) -> Tensor:
        return self.clip.scale * normalize(batch.features, dim=-1) @ self.classifier.T

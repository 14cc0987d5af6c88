"""DualPrompt (https://arxiv.org/abs/2204.04799): a general prompt for all tasks, and an expert prompt for each task.

Prompts are prefixes of keys and values inside the frozen tower. The general prompt G is used at the first layers and
trained in every task; task t adds an expert E_t at later layers, with a key k_t. With the query q(x), the
picture's feature without prompts:

    train:  loss = CE(head(f(x; G, E_t)), y; classes of task t) − λ · cos(q(x), k_t)
    test:   t(x) = argmax_t cos(q(x), k_t),  scores = head(f(x; G, E_t(x))) over all classes seen

A new expert starts as a copy of the last one. Read at google-research/l2p, commit dd8836e, and its port
JH-LEE-KR/dualprompt-pytorch, commit 7eb457d. There a batch votes on its task, and the number of tasks is known in
advance; here each picture has its own expert. A port to CLIP freezes G; here it is trained, as described.
"""

from collections.abc import Sequence

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clipcil.data.reader import Batch, Pictures
from clipcil.data.tasks import Task
from clipcil.distributed import spread
from clipcil.heads.linear import GrowingHead
from clipcil.methods.base import Method
from clipcil.methods.registry import register
from clipcil.prompts.visual import Range, cosine, existing, missing_note, prefixes, uniform
from clipcil.settings import options
from clipcil.training.augment import TowerTraining, training_inputs


@options
class DualPromptConfig:
    """Defaults: the port on CIFAR-100. Layers that a tower does not have are left out, and noted."""

    train: TowerTraining = TowerTraining(
        epochs=5, lr=2.8e-3, batch_size=24, optimizer="adam", weight_decay=0, schedule="constant", clip_norm=1
    )
    """Training of prompts, key and head: Adam at a constant 0.03 × batch / 256."""
    general_layers: tuple[NonNegativeInt, ...] = (0, 1)
    """Layers of the general prompt, from 0."""
    general_length: PositiveInt = 5
    """Vectors of the general prompt for the keys of a layer, and as many for its values."""
    expert_layers: tuple[NonNegativeInt, ...] = (2, 3, 4)
    """Layers of the expert prompts, from 0."""
    expert_length: PositiveInt = 5
    """Vectors of an expert prompt for the keys of a layer, and as many for its values."""
    pull: NonNegativeFloat = 1.0
    """λ, weight of the cosine of query and key. Keys have no other gradient, so with Adam it matters little."""
    prompt_range: Range = (-1.0, 1.0)
    """Prompts are initialised from U[low, high); the authors have (0, 0.01)."""
    key_range: Range = (-0.01, 0.01)
    """Keys are initialised from U[low, high); the port has (−1, 1), from which a task of few steps cannot turn them."""


@register
class DualPrompt(Method):
    name = "dualprompt"
    title = "DualPrompt"
    Config = DualPromptConfig
    keeps = "prompts"
    config: DualPromptConfig

    def build(self) -> None:
        depth = self.clip.config.vision.layers
        self.general_layers = existing(self.config.general_layers, depth)
        self.expert_layers = existing(self.config.expert_layers, depth)
        self.general = self.new_prompt(len(self.general_layers), self.config.general_length)
        self.experts = nn.ParameterList()  # a task each: (layers, 2·L, width)
        self.keys = nn.ParameterList()  # a task each: (1, dim)
        self.head = GrowingHead(self.dim, self.device)

    def new_prompt(self, layers: int, length: int) -> nn.Parameter:
        """(layers, 2·L, width): at each layer L vectors for the keys, then L for the values."""
        width = self.clip.config.vision.width
        return uniform(layers, 2 * length, width, between=self.config.prompt_range, device=self.device)

    def allocate(self, names: Sequence[str]) -> None:
        expert = self.new_prompt(len(self.expert_layers), self.config.expert_length)
        if len(self.experts):
            expert.copy_(self.experts[-1])
        self.experts.append(expert)
        self.keys.append(uniform(1, self.dim, between=self.config.key_range, device=self.device))
        self.head.grow(len(names))

    def learn_task(self, task: Task) -> None:
        labels, queries = task.pictures.labels - self.old, task.pictures.features

        def loss(rows: Tensor, batch: Pictures) -> Tensor:
            pixels, query = training_inputs(self.clip.vision, batch.pixels, queries[rows], self.config.train.augment)
            features = spread(lambda part: self.encode(part, self.experts[-1].unsqueeze(1)), pixels)
            near = cosine(query, self.keys[-1]).mean()
            return cross_entropy(self.head.current(features), labels[rows]) - self.config.pull * near

        parameters = [self.general, self.experts[-1], self.keys[-1], *self.head.newest()]
        self.trainer.fit("train", parameters, task.pictures, loss, self.config.train)

    def logits(self, batch: Batch) -> Tensor:
        experts = torch.stack(list(self.experts), dim=1)  # (layers, K, 2·L, width)
        return self.head(self.encode(batch.pixels, experts[:, self.tasks(batch)]))

    def tasks(self, batch: Batch) -> Tensor:
        """The predicted task of each picture, (B,) int64: the task of the nearest key."""
        return cosine(batch.features, torch.cat(list(self.keys))).argmax(dim=1)

    def encode(self, pixels: Tensor, experts: Tensor) -> Tensor:
        """The prompted pass with `experts` (layers, B or 1, 2·L, width): (B, dim)."""
        general = prefixes(self.general_layers, self.general.unsqueeze(1))
        expert = prefixes(self.expert_layers, experts)
        for layer in general.keys() & expert.keys():  # both kinds at one layer: one after the other
            both = zip(general[layer], expert[layer], strict=True)
            keys, values = (torch.cat([g.expand(len(e), -1, -1), e], dim=1) for g, e in both)
            expert[layer] = (keys, values)
        return self.clip.vision(pixels, prefixes=general | expert, class_only=True).features

    def notes(self) -> list[str]:
        layers = (*self.config.general_layers, *self.config.expert_layers)
        return [*missing_note(layers, self.clip.config.vision.layers), *self.head.notes()]

"""DualPrompt, "Complementary Prompting for Rehearsal-free Continual Learning", on CLIP's vision tower.

https://arxiv.org/abs/2204.04799

Two kinds of prompts by prefix tuning, that is (p_K, p_V) in front of a layer's keys and values:
- the general prompt (G) at the first layers, one for all tasks and trained in all of them;
- an expert prompt (E) at the layers after those, one for each task t, with a key k_t.

    train:  loss = CE(head(f(x; G, E_t)), y; classes of task t) − λ · cos(q(x), k_t)
    test:   t(x) = argmax_t cos(q(x), k_t),  scores = head(f(x; G, E_t(x))) over all classes seen

q(x) is the picture's feature from the frozen tower without prompts. A new expert starts as a copy of the one before it,
a new key is initialised anew. Trained: G, E_t, k_t, the head's rows of task t. Kept of old pictures: nothing.

Where implementations and paper differ:
- Ports reshape the chosen experts without a permute, which mixes the pictures of a batch, and let a batch vote on its
  task. Here each picture has the expert of its own nearest key, whatever else is in the batch.
- A CLIP port freezes the general prompt at its random start together with the tower. Here it trains, as described.
- The pool of the references has the size of the number of tasks known in advance. Here each task adds its expert.

Read at google-research/l2p, commit dd8836e, and JH-LEE-KR/dualprompt-pytorch, commit 7eb457d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

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
from clipcil.prompts.visual import check_range, cosine, existing, missing_note, prefixes, uniform
from clipcil.settings import options
from clipcil.training.augment import TowerTraining, training_inputs


@options
class DualPromptConfig:
    train: TowerTraining = field(
        default_factory=lambda: TowerTraining(
            epochs=5, lr=2.8e-3, batch_size=24, optimizer="adam", weight_decay=0, schedule="constant", clip_norm=1
        )
    )
    """The single-GPU port's values on CIFAR-100: Adam at a constant 0.03 × batch 24 / 256 (rounded here), 5 epochs,
    gradients clipped to norm 1. The authors have 24 pictures on each of several devices, whose number they do not say,
    and the rate of the whole batch. Both crop and flip the pictures (`augment`)."""
    general_layers: tuple[NonNegativeInt, ...] = (0, 1)
    """Layers of the general prompt, from 0; the authors' value. Layers that a tower lacks are left out, and noted."""
    general_length: PositiveInt = 5
    """Vectors for the keys, and as many for the values, at each of these layers; the authors' value."""
    expert_layers: tuple[NonNegativeInt, ...] = (2, 3, 4)
    """Layers of the expert prompts, from 0; the authors' value. Layers that a tower lacks are left out, and noted."""
    expert_length: PositiveInt = 5
    """Vectors for the keys, and as many for the values; the authors: 5 on CIFAR-100, 20 on ImageNet-R."""
    pull: NonNegativeFloat = 1.0
    """λ; the authors' value. Keys get no other gradient, so with Adam the size matters little."""
    prompt_range: tuple[float, ...] = (-1.0, 1.0)
    """Prompts are initialised from U[low, high); the port's range. The authors draw from U[0, 0.01)."""
    key_range: tuple[float, ...] = (-0.01, 0.01)
    """Keys are initialised from U[low, high). The port has (−1, 1), the authors (0, 0.01). The cosine ignores a key's
    length, but a key of size r takes about r/lr steps of Adam to turn, and a task of few pictures has fewer steps. With
    enough steps the range does not matter. (Embedded dataset, 15 steps a task: the right one of ten tasks is found for
    12 % of the pictures with (−1, 1), 29 % with this.)"""

    def __post_init__(self) -> None:
        check_range("prompt_range", self.prompt_range)
        check_range("key_range", self.key_range)


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
        pictures, queries = task.pictures, task.pictures.features
        labels = pictures.labels - self.old

        def loss(rows: Tensor, batch: Pictures) -> Tensor:
            pixels, query = training_inputs(self.clip.vision, batch.pixels, queries[rows], self.config.train.augment)
            features = spread(lambda part: self.encode(part, self.experts[-1].unsqueeze(1)), pixels)
            near = cosine(query, self.keys[-1]).mean()
            return cross_entropy(self.head.current(features), labels[rows]) - self.config.pull * near

        parameters = [self.general, self.experts[-1], self.keys[-1], *self.head.newest()]
        self.trainer.fit("train", parameters, pictures, loss, self.config.train)

    def logits(self, batch: Batch) -> Tensor:
        experts = torch.stack(list(self.experts), dim=1)  # (layers, K, 2·L, width)
        scores: Tensor = self.head(self.encode(batch.pixels, experts[:, self.tasks(batch)]))
        return scores

    def tasks(self, batch: Batch) -> Tensor:
        """The task each picture is taken to belong to, (B,) int64: that of its nearest key."""
        return cosine(batch.features, torch.cat(list(self.keys))).argmax(dim=1)

    def encode(self, pixels: Tensor, experts: Tensor) -> Tensor:
        """The prompted pass with `experts` (layers, B or 1, 2·L, width): (B, dim)."""
        general = prefixes(self.general_layers, self.general.unsqueeze(1))
        expert = prefixes(self.expert_layers, experts)
        for layer in general.keys() & expert.keys():  # both kinds at one layer: one after the other
            both = zip(general[layer], expert[layer], strict=True)
            keys, values = (torch.cat([g.expand(len(e), -1, -1), e], dim=1) for g, e in both)
            expert[layer] = (keys, values)
        features: Tensor = self.clip.vision(pixels, prefixes=general | expert, class_only=True).features
        return features

    def notes(self) -> list[str]:
        layers = (*self.config.general_layers, *self.config.expert_layers)
        return [*missing_note(layers, self.clip.config.vision.layers), *self.head.notes()]

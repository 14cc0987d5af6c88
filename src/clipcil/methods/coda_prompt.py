"""CODA-Prompt (https://arxiv.org/abs/2211.13218): each picture's prompt is a weighted sum of components.

A component at a prompted layer of the frozen tower has a prompt P_m of L vectors, a key K_m and an attention vector
A_m. With the query q(x), the picture's feature without prompts:

    α_m = cos(q(x) ⊙ A_m, K_m),   p(x) = Σ_m α_m P_m

The first half of p(x) goes in front of the layer's keys, the second in front of its values. A task adds components;
earlier ones stay in the sum and are frozen. New rows of P (flattened), K and A start as unit vectors orthogonal to all
earlier rows of their layer (Gram–Schmidt):

    loss = CE(head(f(x; p)), y; classes of the current task) + λ Σ_{B∈{P,K,A}} mean((B Bᵀ − I)²), summed over layers

Read at GT-RIPL/CODA-Prompt, commit 6417d4f. There 100 components are divided by a number of tasks known in advance, and
the last incomplete batch is dropped; here a task adds `components`, and the batch is kept.
"""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from clipcil.data.reader import Batch, Pictures
from clipcil.data.tasks import Task
from clipcil.distributed import spread
from clipcil.heads.linear import GrowingHead
from clipcil.methods.base import Method
from clipcil.methods.registry import register
from clipcil.prompts.visual import existing, missing_note, orthogonal_rows, prefixes
from clipcil.settings import options
from clipcil.training.augment import TowerTraining, training_inputs


@options
class CODAPromptConfig:
    """The defaults are the authors' values on CIFAR-100."""

    train: TowerTraining = TowerTraining(
        epochs=20, lr=1e-3, batch_size=128, optimizer="adam", weight_decay=0, schedule="quarter-cosine"
    )
    """Training of the newest components and the head."""
    layers: tuple[NonNegativeInt, ...] = (0, 1, 2, 3, 4)
    """Layers that get a prompt, from 0. Those that a tower does not have are left out, and noted."""
    components: PositiveInt = 10
    """Components that a task adds at each layer; the authors have 10 for each of ten tasks, 5 of twenty."""
    length: Annotated[int, Field(ge=2, multiple_of=2)] = 8
    """L, vectors of a component: half for the keys, half for the values."""
    ortho: NonNegativeFloat = 0.0
    """λ, weight of the orthogonality penalty; 0 in the released scripts."""


Components = tuple[Tensor, ...]
"""P (layers, M, L·width), K (layers, M, dim), A (layers, M, dim)."""


@register
class CODAPrompt(Method):
    name = "coda-prompt"
    title = "CODA-Prompt"
    Config = CODAPromptConfig
    keeps = "prompts"
    config: CODAPromptConfig

    def build(self) -> None:
        self.layers = existing(self.config.layers, self.clip.config.vision.layers)
        self.prompts = nn.ParameterList()  # a task each: (layers, m, L·width)
        self.keys = nn.ParameterList()  # a task each: (layers, m, dim)
        self.attention = nn.ParameterList()  # a task each: (layers, m, dim)
        self.head = GrowingHead(self.dim, self.device)

    def allocate(self, names: Sequence[str]) -> None:
        dim, width = self.dim, self.clip.config.vision.width
        for rows, size in ((self.prompts, self.config.length * width), (self.keys, dim), (self.attention, dim)):
            empty = torch.zeros(len(self.layers), 0, size, device=self.device)
            earlier = torch.cat([empty, *rows], dim=1)  # (layers, n, size)
            new = torch.zeros(len(self.layers), self.config.components, size, device=self.device)
            for layer in range(len(self.layers)):
                new[layer] = orthogonal_rows(earlier[layer], self.config.components)
            rows.append(nn.Parameter(new, requires_grad=False))
        self.head.grow(len(names))

    def learn_task(self, task: Task) -> None:
        labels, queries = task.pictures.labels - self.old, task.pictures.features

        def loss(rows: Tensor, batch: Pictures) -> Tensor:
            components = self.components()
            pixels, query = training_inputs(self.clip.vision, batch.pixels, queries[rows], self.config.train.augment)
            features = spread(lambda part, own: self.encode(part, own, components), pixels, query)
            value = cross_entropy(self.head.current(features), labels[rows])
            return value + self.config.ortho * penalty(components) if self.config.ortho else value

        parameters = [self.prompts[-1], self.keys[-1], self.attention[-1], *self.head.newest()]
        self.trainer.fit("train", parameters, task.pictures, loss, self.config.train)

    def logits(self, batch: Batch) -> Tensor:
        return self.head(self.encode(batch.pixels, batch.features, self.components()))

    def components(self) -> Components:
        """Those of all tasks side by side."""
        return tuple(torch.cat(list(rows), dim=1) for rows in (self.prompts, self.keys, self.attention))

    def encode(self, pixels: Tensor, queries: Tensor, components: Components) -> Tensor:
        """The prompted pass: pictures (B, C, H, W) with queries (B, dim) → (B, dim)."""
        prompts, keys, attention = components
        mixed = weights(queries, keys, attention) @ prompts  # (layers, B, L·width)
        mixed = mixed.reshape(len(self.layers), len(pixels), self.config.length, self.clip.config.vision.width)
        return self.clip.vision(pixels, prefixes=prefixes(self.layers, mixed), class_only=True).features

    def notes(self) -> list[str]:
        return [*missing_note(self.config.layers, self.clip.config.vision.layers), *self.head.notes()]


def weights(queries: Tensor, keys: Tensor, attention: Tensor) -> Tensor:
    """α_m = cos(q ⊙ A_m, K_m): queries (B, dim), keys and attention (layers, M, dim) → (layers, B, M).

    The inner product of q ⊙ A_m with K̂_m is q·(A_m ⊙ K̂_m), and its squared length q²·A_m²: two matrix products.
    """
    inner = queries @ (attention * normalize(keys, dim=-1)).transpose(1, 2)
    squared = queries.square() @ attention.square().transpose(1, 2)
    return inner / squared.clamp_min(1e-16).sqrt()


def penalty(components: Components) -> Tensor:
    """Σ over P, K, A of mean((B Bᵀ − I)²), summed over layers."""
    total = components[0].new_zeros(())
    for rows in components:
        gram = rows @ rows.transpose(1, 2)  # (layers, M, M)
        total = total + (gram - torch.eye(gram.shape[1], device=gram.device)).square().mean(dim=(1, 2)).sum()
    return total

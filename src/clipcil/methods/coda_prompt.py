"""CODA-Prompt, "COntinual Decomposed Attention-based Prompting", on CLIP's vision tower.

https://arxiv.org/abs/2211.13218

At each prompted layer a picture's prompt is a weighted sum of components P_m (L vectors), each with a key K_m and an
attention vector A_m; q(x) is the picture's feature from the frozen tower without prompts:

    α_m = cos(q(x) ⊙ A_m, K_m),   p(x) = Σ_m α_m P_m

and p(x) goes in front of the layer's keys (first half) and values (second half). A task adds its own components; those
of earlier tasks stay in the sum but no longer train. New rows of P (flattened), K and A start as unit vectors
orthogonal to all earlier rows at their layer (Gram–Schmidt), so that a task starts in directions not used before:

    loss = CE(head(f(x; p)), y; classes of the current task) + λ Σ_{B∈{P,K,A}} mean((B Bᵀ − I)²), summed over layers

Trained: the task's components and its rows of the head. Kept of old pictures: nothing.

Where implementations and paper differ:
- λ is 0 in the released scripts (the orthogonal initialisation makes the penalty unnecessary) and here; it is an
  option.
- The reference divides a fixed total (100) by a number of tasks known in advance. Here a task adds `components`,
  whatever their number, so the stream may be of any length.
- The reference drops the last incomplete batch of training; with few pictures that would be all of them, so here it
  is kept.

Read at GT-RIPL/CODA-Prompt, commit 6417d4f.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
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
    train: TowerTraining = field(
        default_factory=lambda: TowerTraining(
            epochs=20, lr=1e-3, batch_size=128, optimizer="adam", weight_decay=0, schedule="quarter-cosine"
        )
    )
    """The authors' values: Adam 1e-3, a quarter of a cosine lowered once an epoch (mean rate 0.64 of the highest),
    batch 128, 20 epochs on CIFAR-100 (50 on ImageNet-R). They crop and flip the pictures (`augment`)."""
    layers: tuple[NonNegativeInt, ...] = (0, 1, 2, 3, 4)
    """Layers that get a prompt, from 0; the paper's value. Layers that a tower lacks are left out, and noted."""
    components: PositiveInt = 10
    """Components that a task adds at each layer; the authors have 100 in all: 10 for each of ten tasks, 5 of twenty."""
    length: Annotated[int, Field(ge=2, multiple_of=2)] = 8
    """L, vectors of a component: half for the keys, half for the values; the reference's value."""
    ortho: NonNegativeFloat = 0.0
    """λ of the orthogonality penalty; 0 in the released scripts."""


Components = tuple[Tensor, Tensor, Tensor]
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
        pictures, queries = task.pictures, task.pictures.features
        labels = pictures.labels - self.old
        earlier = self.components(len(self.sizes) - 1)
        newest = (self.prompts[-1], self.keys[-1], self.attention[-1])

        def loss(rows: Tensor, batch: Pictures) -> Tensor:
            components = join(earlier, newest)
            pixels, query = training_inputs(self.clip.vision, batch.pixels, queries[rows], self.config.train.augment)
            features = spread(lambda part, own: self.encode(part, own, components), pixels, query)
            value = cross_entropy(self.head.current(features), labels[rows])
            if self.config.ortho:
                value = value + self.config.ortho * penalty(components)
            return value

        self.trainer.fit("train", [*newest, *self.head.newest()], pictures, loss, self.config.train)

    def logits(self, batch: Batch) -> Tensor:
        scores: Tensor = self.head(self.encode(batch.pixels, batch.features, self.components(len(self.sizes))))
        return scores

    def components(self, tasks: int) -> Components | None:
        """Those of the first `tasks` tasks side by side."""
        if tasks == 0:
            return None
        prompts, keys, attention = (
            torch.cat(list(rows)[:tasks], dim=1) for rows in (self.prompts, self.keys, self.attention)
        )
        return prompts, keys, attention

    def encode(self, pixels: Tensor, queries: Tensor, components: Components | None) -> Tensor:
        """The prompted pass: (B, dim)."""
        if components is None:
            raise ValueError("no task has been learnt")
        prompts, keys, attention = components
        mixed = weights(queries, keys, attention) @ prompts  # (layers, B, L·width)
        mixed = mixed.reshape(len(self.layers), len(pixels), self.config.length, self.clip.config.vision.width)
        features: Tensor = self.clip.vision(pixels, prefixes=prefixes(self.layers, mixed), class_only=True).features
        return features

    def notes(self) -> list[str]:
        return [*missing_note(self.config.layers, self.clip.config.vision.layers), *self.head.notes()]


def join(earlier: Components | None, newest: Components) -> Components:
    """Components of earlier tasks and of the newest side by side."""
    if earlier is None:
        return newest
    prompts, keys, attention = (torch.cat(pair, dim=1) for pair in zip(earlier, newest, strict=True))
    return prompts, keys, attention


def weights(queries: Tensor, keys: Tensor, attention: Tensor) -> Tensor:
    """α_m = cos(q ⊙ A_m, K_m): queries (B, dim), keys and attention (layers, M, dim) → (layers, B, M).

    q ⊙ A_m is never formed for every pair: its inner product with K̂_m is q·(A_m ⊙ K̂_m), its squared length
    q²·A_m², two matrix products.
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

"""What the published loops read: features of each task, and how their answers are scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipcil.clip import CLIP
from clipcil.data.reader import Pictures
from clipcil.data.tasks import TaskStream
from clipcil.prompts.templates import raw_sentences


@dataclass
class Part:
    """The training or test pictures of one task."""

    features: Tensor  # (n, dim) raw
    pooled: Tensor  # (n, width) before the projection
    labels: Tensor  # (n,)
    pictures: Pictures  # for pixels


@dataclass
class Features:
    """A stream as features, with the raw texts of every template."""

    clip: CLIP
    train: list[Part]
    test: list[Part]
    sizes: list[int]
    names: list[str]
    sentences: Tensor  # (C, T, dim) raw

    @classmethod
    def read(cls, clip: CLIP, stream: TaskStream, templates: tuple[str, ...]) -> Features:
        opened = [*map(stream._reader.open, stream._train), *map(stream.test, range(len(stream)))]
        parts = [Part(pictures.features, pictures.pooled, pictures.labels, pictures) for pictures in opened]
        train, test = parts[: len(stream)], parts[len(stream) :]
        sentences = raw_sentences(clip, stream.names, templates)
        return cls(clip, train, test, stream.sizes, stream.names, sentences)

    def seen(self, task: int) -> int:
        return sum(self.sizes[: task + 1])


def accuracy(features: Features, score: Callable[[Any], Tensor], size: int) -> float:
    """Percent of all test pictures, scored in batches of `size` in the order of the classes, as the codes load them."""
    right = total = 0
    for part in features.test:
        for rows in torch.split(torch.arange(len(part.labels)), size):
            batch = Part(part.features[rows], part.pooled[rows], part.labels[rows], part.pictures)
            with torch.no_grad():
                right += int((score(batch).argmax(1) == batch.labels).sum())
            total += len(rows)
    return 100 * right / total


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def batches(count: int, size: int) -> tuple[Tensor, ...]:
    return torch.split(torch.randperm(count), size)


def add_up(layers: nn.ModuleList, inputs: Tensor) -> Tensor:
    """The sum over tasks of the outputs of each task's layer."""
    return torch.stack([layer(inputs) for layer in layers]).sum(0)

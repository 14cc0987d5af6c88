"""Tasks of features without pictures, for methods that read only features."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from clipcil.clip import CLIP
from clipcil.data.tasks import Task
from clipcil.methods.base import Method

WORDS = ["dog", "cat", "fire engine", "tree", "house", "boat", "apple", "key", "moon", "shoe", "chair", "bird"]


class FeaturePictures:
    """Stands for `Pictures` where only features and labels are read."""

    key = "made up"

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.features, self.pooled, self.labels = features, features, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor | slice) -> FeaturePictures:
        return FeaturePictures(self.features[rows], self.labels[rows])

    def batches(self, size: int) -> Iterator[FeaturePictures]:
        for start in range(0, len(self), size):
            yield self[start : start + size]


def draw(clip: CLIP, labels: Tensor, noise: float = 0.6, seed: int = 0) -> FeaturePictures:
    """Features near a random centre for each class; the centres are the same for every call."""
    centres = torch.randn(len(WORDS), clip.config.dim, generator=torch.Generator().manual_seed(99))
    spread = torch.randn(len(labels), clip.config.dim, generator=torch.Generator().manual_seed(seed))
    return FeaturePictures(3 * (centres[labels] + noise * spread), labels)


def make_tasks(clip: CLIP, sizes: list[int], per_class: int | list[int] = 12) -> list[Task]:
    """A task for each of `sizes`, with `per_class` training pictures (one number, or one for each class)."""
    counts = [per_class] * sum(sizes) if isinstance(per_class, int) else per_class
    tasks, first = [], 0
    for index, size in enumerate(sizes):
        labels = torch.cat([torch.full((counts[label],), label) for label in range(first, first + size)])
        pictures = draw(clip, labels, seed=index)
        tasks.append(Task(index, WORDS[first : first + size], pictures))  # type: ignore[arg-type]
        first += size
    return tasks


def make_test(clip: CLIP, classes: int, per_class: int = 10) -> FeaturePictures:
    return draw(clip, torch.arange(classes).repeat_interleave(per_class), seed=1000)


def learn_all(method: Method, tasks: list[Task], seed: int = 0) -> Method:
    torch.manual_seed(seed)
    for task in tasks:
        method.train()
        method.learn(task)
    return method.eval()

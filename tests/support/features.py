"""Tasks made of features alone, for methods that read nothing else of a picture."""

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
        self.features, self.labels = features, labels

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


def accuracy(method: Method, pictures: FeaturePictures) -> float:
    with torch.no_grad():
        guess = method.logits(pictures).argmax(1)  # type: ignore[arg-type]
    return float((guess == pictures.labels).float().mean())


@torch.no_grad()
def assert_batch_invariant(method: Method, pictures: FeaturePictures) -> None:
    """Equal logits for batches of 1, 7 and 64 and for shuffled order, to 1e-5 of the largest score."""
    whole = method.logits(pictures)  # type: ignore[arg-type]
    close = {"atol": 1e-5 * max(1.0, float(whole.abs().max())), "rtol": 1e-5}
    assert whole.shape == (len(pictures), method.seen)
    for size in (1, 7, 64):
        parts = torch.cat([method.logits(batch) for batch in pictures.batches(size)])  # type: ignore[arg-type]
        torch.testing.assert_close(parts, whole, **close)
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(method.logits(pictures[order]), whole[order], **close)  # type: ignore[arg-type]


def assert_survives_checkpoint(method: Method, fresh: Method, pictures: FeaturePictures) -> None:
    """A fresh method, grown and filled from the state of `method`, gives the same logits to the bit."""
    start = 0
    for size in method.sizes:
        fresh.grow(method.names[start : start + size])
        start += size
    fresh.load_state_dict({key: value.clone() for key, value in method.state_dict().items()})
    fresh.eval()
    with torch.no_grad():
        assert torch.equal(method.logits(pictures), fresh.logits(pictures))  # type: ignore[arg-type]

"""What a backbone can do on pictures it never saw: nearest class mean and zero-shot, by one command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from clipcil.clip import CLIP
from clipcil.data.dataset import Dataset, open_dataset
from clipcil.data.pictures import PictureSet

TEMPLATE = "a photo of a {}"
SHOTS = 50


@dataclass(frozen=True)
class Figures:
    """Accuracies in percent on one dataset's test pictures."""

    data: str
    test: int
    nearest_mean: float
    zero_shot: float
    top5: float


def measure(clip: CLIP, dataset: Dataset, seed: int = 0) -> Figures:
    """Nearest class mean from at most 50 training pictures per class; zero-shot with "a photo of a {}"."""
    dataset = dataset.shrink(SHOTS, seed)
    train, test = encode(clip, dataset.train), encode(clip, dataset.test)
    labels = dataset.test.labels
    means = torch.stack([train[dataset.train.labels == label].mean(0) for label in range(len(dataset.classes))])
    texts = clip.encode_texts([TEMPLATE.format(name) for name in dataset.classes])
    ranks = rank(test @ F.normalize(texts, dim=-1).T, labels)
    nearest = rank(test @ F.normalize(means, dim=-1).T, labels)
    return Figures(dataset.name, len(labels), percent(nearest == 0), percent(ranks == 0), percent(ranks < 5))


def encode(clip: CLIP, pictures: PictureSet) -> Tensor:
    """(N, dim), unit length."""
    found = []
    with torch.no_grad():
        for start in range(0, len(pictures), 128):
            batch = clip.preprocess([pictures.image(i) for i in range(start, min(start + 128, len(pictures)))])
            found.append(F.normalize(clip.vision(batch, class_only=True).features, dim=-1))
    return torch.cat(found)


def rank(scores: Tensor, labels: Tensor) -> Tensor:
    """How many classes score higher than the right one."""
    return (scores > scores.gather(1, labels[:, None])).sum(1)


def percent(hits: Tensor) -> float:
    return round(100 * hits.double().mean().item(), 1)


def all_figures(clip: CLIP, cifar100: Path, cub200: Path, say: Callable[[str], None] = print) -> list[Figures]:
    """CIFAR-100 and CUB from their folders, the embedded emoji."""
    found = []
    for name, root in (("emoji", None), ("cifar100", cifar100), ("cub200", cub200)):
        figures = measure(clip, open_dataset(name, root))
        found.append(figures)
        say(line(figures))
    return found


def line(figures: Figures) -> str:
    return f"| {figures.data} | {figures.test:,} | {figures.nearest_mean} | {figures.zero_shot} | {figures.top5} |"

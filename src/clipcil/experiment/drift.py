"""How far stored class Gaussians lie from the real features of old classes, before and after calibration.

The real features come from the test pictures: methods never see them, nor these numbers.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass

import torch
from torch.nn.functional import cosine_similarity, normalize

from clipcil.calibration.optimal_transport import wasserstein2_to_samples
from clipcil.data.stream import TaskStream
from clipcil.memory.gaussians import GaussianMemory
from clipcil.methods.base import Method


@dataclass(frozen=True)
class Drift:
    """Means over the old classes. Cosine: 1 − cos(stored mean, true mean); W₂: distance between the Gaussians."""

    cosine_before: float
    cosine_after: float
    w2_before: float
    w2_after: float


def copy_memory(method: Method) -> GaussianMemory | None:
    """The method's Gaussians as they are, to be compared once the tower has moved."""
    memory = getattr(method, "memory", None)
    if not method.tunes_tower or not isinstance(memory, GaussianMemory) or not len(memory):
        return None
    return copy.deepcopy(memory)


def measure_drift(before: GaussianMemory, method: Method, stream: TaskStream, tasks: int) -> dict[str, float]:
    """Compare the Gaussians of the first `tasks` tasks, before and after learning, with the test features of today."""
    after = method.memory
    assert isinstance(after, GaussianMemory)
    rows: list[tuple[float, float, float, float]] = []
    for index in range(tasks):
        pictures = stream.test(index)
        features, labels = normalize(pictures.features, dim=-1).double(), pictures.labels
        for label in torch.unique(labels).tolist():
            real = features[labels == label]
            numbers = []
            for memory in (before, after):
                mean, cov = memory.moments(label)
                apart = 1 - cosine_similarity(mean, real.mean(0), dim=0)
                numbers.append((float(apart), float(wasserstein2_to_samples(mean, cov, real).sqrt())))
            (cosine_before, w2_before), (cosine_after, w2_after) = numbers
            rows.append((cosine_before, cosine_after, w2_before, w2_after))
    means = torch.tensor(rows, dtype=torch.float64).mean(0).tolist()
    return asdict(Drift(*means))

"""How far stored class Gaussians lie from the features that the same pictures have today.

The experiment reads old training pictures again for this: methods never see them, nor these numbers.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from clipcil.calibration import wasserstein2_to_samples
from clipcil.data.tasks import TaskStream
from clipcil.memory.gaussians import GaussianMemory
from clipcil.memory.ledoit_wolf import average_moments
from clipcil.methods.base import Method

MOST = 50
"""Pictures of a class that are encoded again: more would mostly cost time."""


@dataclass(frozen=True)
class Drift:
    """Means over the old classes. Cosine: 1 − cos(stored mean, today's mean); W₂: distance between the Gaussians.

    The floors are what a perfect calibration would still show: of the cosine because at most `MOST` of the pictures
    are encoded again, of W₂ because the stored covariance is a shrunk one.
    """

    cosine_before: float
    cosine_after: float
    cosine_floor: float
    w2_before: float
    w2_after: float
    w2_floor: float


def copy_memory(method: Method) -> GaussianMemory | None:
    """The method's Gaussians as they are, to be compared once the tower has moved."""
    memory = getattr(method, "memory", None)
    if not method.tunes_tower or not isinstance(memory, GaussianMemory) or not len(memory):
        return None
    return copy.deepcopy(memory)


def measure_drift(before: GaussianMemory, method: Method, stream: TaskStream, tasks: int) -> dict[str, float]:
    """Compare the Gaussians of the first `tasks` tasks, before and after learning, with their pictures' features of
    today."""
    after = method.memory
    assert isinstance(after, GaussianMemory)
    rows: list[Drift] = []
    for index in range(tasks):
        with stream.trained(index, MOST) as pictures:
            features, labels = normalize(pictures.features, dim=-1).double(), pictures.labels
            for label in torch.unique(labels).tolist():
                rows.append(class_drift(features[labels == label], before, after, label))
    table = torch.tensor([list(asdict(row).values()) for row in rows], dtype=torch.float64)
    return asdict(Drift(*table.mean(0).tolist()))


def class_drift(real: Tensor, before: GaussianMemory, after: GaussianMemory, label: int) -> Drift:
    """One class, from features (m, d) that its pictures have today; m may be fewer than were stored.

    The mean of m of n pictures misses that of all by tr(S)(1/m − 1/n) in its squared length, on average, and half of
    that over ‖μ‖² in 1 − cosine, but for the part along μ.
    """
    cosines, distances = [], []
    for memory in (before, after):
        mean, cov = memory.moments(label)
        cosines.append(float(1 - cosine_similarity(mean, real.mean(0), dim=0)))
        distances.append(float(wasserstein2_to_samples(mean, cov, real).sqrt()))
    count, centre = len(real), real.mean(0)
    spread = (real - centre).square().sum() / max(1, count - 1)
    missing = max(0.0, 1 / count - 1 / max(1, int(after.counts[label])))
    cosine_floor = float(spread * missing / (2 * centre.square().sum()))
    w2_floor = float(wasserstein2_to_samples(*average_moments([real]), real).sqrt())
    return Drift(cosines[0], cosines[1], cosine_floor, distances[0], distances[1], w2_floor)

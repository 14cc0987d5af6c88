"""Temperature scaling and the threshold for unknown pictures ("none of these").

Both are fitted to held-out pictures of known classes, scored again by the current model after every lesson. No picture
of an unknown class is needed: the threshold is set so that at most the allowed share of known ones is called unknown.

What is compared with the threshold is the method's own novelty score, such as the distance to the nearest class; for a
method without one, the highest probability (`python -m reproduce.lessons unknown` compares them).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

FALSE_ALARMS = 0.05
"""Share of pictures of known classes that may be called unknown."""
ENOUGH = 20
"""Held-out pictures needed to fit a temperature and a threshold; a 5 % threshold needs at least 19."""


@dataclass(frozen=True)
class Calibration:
    """How scores become probabilities and decisions. With too few held-out pictures no picture is called unknown."""

    temperature: float = 1.0
    """Logits are multiplied by it before the softmax."""
    threshold: float | None = None
    """A picture whose highest probability lies below it is none of the classes; None: nothing is."""
    pictures: int = 0
    """Number of held-out pictures for fitting the two."""
    novelty: float | None = None
    """A picture whose novelty score lies above it is none of the classes; None: the method has no such score, and the
    threshold of the probability decides."""
    false_alarms: float | None = None
    """Expected share of new pictures of known classes that are called unknown; None where there is no threshold."""

    def is_unknown(self, probability: float, novelty: float | None) -> bool:
        """Whether a picture with this highest probability and novelty score is none of the classes."""
        if self.novelty is not None and novelty is not None:
            return novelty > self.novelty
        return self.threshold is not None and probability < self.threshold


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(temperature · logits), (B, C) → (B, C), float64."""
    return torch.softmax(logits.double() * temperature, dim=-1)


def calibrate(
    logits: Tensor, labels: Tensor, plain: float, novelty: Tensor | None = None, rate: float = FALSE_ALARMS
) -> Calibration:
    """Fit temperature and threshold to held-out pictures of known classes.

    Args:
        logits: (N, C) of the current model.
        labels: (N,) true classes.
        plain: The temperature to use where there are too few pictures to fit one.
        novelty: (N,) novelty score of each picture, where the method has one.
        rate: Share of pictures of known classes that may be called unknown.

    Returns:
        With fewer than `ENOUGH` pictures, or with one class, whose probability is always 1: temperature `plain` and no
        threshold, so that no picture is called unknown; a threshold from a handful of pictures would be arbitrary.
    """
    if len(labels) < ENOUGH or logits.shape[1] < 2:
        return Calibration(plain, None, len(labels))
    temperature = fit_temperature(logits, labels)
    scores = probabilities(logits, temperature).max(dim=1).values
    threshold, expected = threshold_for(scores, rate)
    limit = None if novelty is None else -threshold_for(-novelty, rate)[0]
    return Calibration(temperature, threshold, len(scores), limit, expected)


def threshold_for(scores: Tensor, rate: float = FALSE_ALARMS) -> tuple[float, float]:
    """The highest threshold below which at most `rate` of new pictures like these are expected, and that share.

    Of N exchangeable scores and a new one, the new one is below the k-th smallest of the N with probability at most
    k/(N+1) (split conformal prediction), so k = ⌊rate (N+1)⌋. With fewer than 1/rate − 1 scores there is no such k.

    Args:
        scores: (N,) of held-out pictures of known classes.
        rate: Share of false alarms allowed.

    Raises:
        ValueError: Too few scores for this rate.
    """
    place = int(rate * (len(scores) + 1) + 1e-9)
    if place < 1:
        raise ValueError(f"{len(scores)} scores are too few for a rate of {rate}")
    return float(scores.double().sort().values[place - 1]), place / (len(scores) + 1)


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The factor that makes the probabilities of held-out pictures most likely, by golden-section search.

    The likelihood of a softmax is concave in this factor, so the search finds the one maximum; the logarithm of the
    factor is searched between 1/100 and 100 times.
    """
    logits, low, high = logits.double(), torch.tensor(0.01).log().item(), torch.tensor(100.0).log().item()

    def cost(log_factor: float) -> float:
        return float(cross_entropy(logits * torch.tensor(log_factor).exp(), labels))

    golden = (5**0.5 - 1) / 2
    for _ in range(40):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if cost(left) <= cost(right):
            high = right
        else:
            low = left
    return float(torch.tensor((low + high) / 2).exp())

"""How sure is sure: probabilities that mean something, and a threshold for "none of these".

Both are set on held-out pictures of known classes, which the model never trained on. Scores can be judged by held-out
pictures of known classes alone: the threshold is where the wished share of them would be called unknown by mistake.

The score is the highest probability, not the highest logit (for cosine classifiers: the cosine to the nearest class).
Measured on the embedded data, 80 classes learnt in four lessons and 20 never seen, area under the ROC curve: DMC-OT
0.69 by probability and 0.61 by cosine, SimpleCIL 0.74 and 0.72 (`python benchmarks/lessons.py unknown`). It is also
the number that people see beside the name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

FALSE_ALARMS = 0.05
"""Share of pictures of known classes that may be called unknown."""
ENOUGH = 20
"""Held-out pictures from which a 5 % quantile can be read at all: one of them may then lie below it."""

RECENT = 60
"""Held-out pictures a threshold should rest on: the share of new pictures below their 5 % quantile is 5 ± 3 %."""


@dataclass(frozen=True)
class Calibration:
    """What held-out pictures said. Without any, probabilities are the method's own and nothing is ever unknown."""

    temperature: float = 1.0
    """Logits are multiplied by it before the softmax."""
    threshold: float | None = None
    """A picture whose highest probability lies below it is none of the classes; None: nothing is."""
    pictures: int = 0
    """Held-out pictures behind the two."""
    false_alarms: float | None = None
    """Share of them that lie below the threshold."""


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """(B, C) → (B, C), float64."""
    return torch.softmax(logits.double() * temperature, dim=-1)


def calibrate(logits: Tensor, labels: Tensor, earlier: Tensor, plain: float, rate: float = FALSE_ALARMS) -> Calibration:
    """From this lesson's held-out logits (N, C) and labels (N,), and the scores (M,) of those of earlier lessons.

    The earlier pictures are gone and their scores stand as they were measured, among fewer classes and so too high for
    today. They are used, the latest first, only as far as this lesson has fewer than `RECENT` of its own: too few
    pictures would set the threshold by chance.
    `plain`: the temperature where there are too few pictures to fit one.

    Fewer than 20 pictures do not show a 5 % quantile: then the threshold is their lowest score, and the real
    false-alarm rate is about 1/(N + 1). With none there is no threshold.
    """
    temperature = fit_temperature(logits, labels) if len(labels) >= ENOUGH else plain
    earlier = earlier[max(0, len(earlier) - max(0, RECENT - len(labels))) :]
    scores = torch.cat([earlier.double(), probabilities(logits, temperature).max(dim=1).values])
    if not len(scores):
        return Calibration(plain)
    threshold = threshold_for(scores, rate)
    return Calibration(temperature, threshold, len(scores), float((scores < threshold).double().mean()))


def threshold_for(scores: Tensor, rate: float = FALSE_ALARMS) -> float:
    """The highest threshold that calls at most `rate` of these pictures unknown."""
    allowed = int(rate * len(scores)) if len(scores) >= ENOUGH else 0
    return float(scores.double().sort().values[allowed])


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

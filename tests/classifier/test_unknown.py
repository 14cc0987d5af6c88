"""Probabilities and the threshold for "none of these"."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch.nn.functional import cross_entropy

from clipcil.classifier.lesson import split_held_out
from clipcil.classifier.unknown import calibrate, fit_temperature, probabilities, threshold_for

NONE = torch.empty(0, dtype=torch.float64)


def made_up(count: int, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(count, classes, generator=generator)
    labels = torch.distributions.Categorical(logits=3 * logits).sample()
    return logits, labels


def test_temperature_is_scipys() -> None:
    logits, labels = made_up(400)
    found = minimize_scalar(
        lambda log: float(cross_entropy(logits.double() * np.exp(log), labels)), bounds=(-4.6, 4.6), method="bounded"
    )
    assert fit_temperature(logits, labels) == pytest.approx(float(np.exp(found.x)), rel=1e-2)


@pytest.mark.parametrize("count", [20, 59, 200, 1000])
def test_false_alarms_are_as_many_as_allowed(count: int) -> None:
    scores = torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    threshold = threshold_for(scores)
    alarms = int((scores < threshold).sum())
    assert alarms == int(0.05 * count)


def test_few_held_out_pictures() -> None:
    logits, labels = made_up(7)
    few = calibrate(logits, labels, NONE, plain=2.5)
    assert few.temperature == 2.5 and few.false_alarms == 0 and few.pictures == 7
    assert few.threshold == pytest.approx(float(probabilities(logits, 2.5).max(1).values.min()))
    nothing = calibrate(logits[:0], labels[:0], NONE, plain=2.5)
    assert nothing.threshold is None and nothing.false_alarms is None


def test_earlier_scores_count_as_far_as_they_are_needed() -> None:
    logits, labels = made_up(30)
    earlier = torch.cat([torch.ones(50), torch.zeros(30)]).double()  # the latest are the last
    both = calibrate(logits, labels, earlier, plain=1.0)
    assert both.pictures == 60 and both.threshold == 0
    logits, labels = made_up(60)
    alone = calibrate(logits, labels, earlier, plain=1.0)
    assert alone.pictures == 60 and alone == calibrate(logits, labels, NONE, plain=1.0)


@pytest.mark.parametrize(
    ("pictures", "held"), [(1, 0), (4, 0), (5, 1), (9, 1), (10, 1), (19, 1), (20, 2), (500, 50), (1234, 123)]
)
def test_a_tenth_is_held_out(pictures: int, held: int) -> None:
    labels = torch.cat([torch.full((pictures,), 4), torch.full((3,), 1)])[torch.randperm(pictures + 3)]
    train, out = split_held_out(labels)
    assert len(out) == held and bool((labels[out] == 4).all())
    assert sorted([*train.tolist(), *out.tolist()]) == list(range(pictures + 3))

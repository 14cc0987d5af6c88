"""Probabilities and the threshold for "none of these"."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch.nn.functional import cross_entropy

from clipcil.classifier.learner import split_held_out
from clipcil.classifier.scoring import calibrate, fit_temperature, probabilities, threshold_for


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


@pytest.mark.parametrize("count", [19, 20, 39, 59, 200])
def test_false_alarms_on_new_pictures_are_as_many_as_promised(count: int) -> None:
    """Over many draws of held-out scores, the share of new scores below the threshold: promised, and at most 5 %."""
    generator = torch.Generator().manual_seed(count)
    rates = []
    for _ in range(400):
        threshold, promised = threshold_for(torch.rand(count, generator=generator, dtype=torch.float64))
        rates.append(threshold)  # of uniform scores, exactly this share of new ones lies below
    assert promised <= 0.05
    assert float(np.mean(rates)) == pytest.approx(promised, abs=4 * float(np.std(rates)) / 20)


def test_too_few_held_out_pictures_give_no_verdict() -> None:
    logits, labels = made_up(19)
    few = calibrate(logits, labels, plain=2.5)
    assert few.temperature == 2.5 and few.threshold is None and few.false_alarms is None and few.pictures == 19
    logits, labels = made_up(20)
    enough = calibrate(logits, labels, plain=2.5)
    assert enough.threshold == float(probabilities(logits, enough.temperature).max(1).values.min())
    assert calibrate(logits[:, :1], torch.zeros(20, dtype=torch.int64), plain=1.0).threshold is None  # one class


@pytest.mark.parametrize(
    ("pictures", "held"), [(1, 0), (4, 0), (5, 1), (9, 1), (10, 1), (19, 1), (20, 2), (500, 50), (1234, 50)]
)
def test_a_tenth_is_held_out(pictures: int, held: int) -> None:
    labels = torch.cat([torch.full((pictures,), 4), torch.full((3,), 1)])[torch.randperm(pictures + 3)]
    train, out = split_held_out(labels)
    assert len(out) == held and bool((labels[out] == 4).all())
    assert sorted([*train.tolist(), *out.tolist()]) == list(range(pictures + 3))

"""Left-out scores equal those of heads that were literally fitted without the picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor
from torch.nn.functional import cross_entropy

from clipcil.heads.lda import fit_rows
from clipcil.heads.stacked import fit_ridge, mix

CLASSES = 5


def some_rows(dim: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unequal classes of 2 to 9 pictures, more and fewer than dimensions, centred."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor([0] * 2 + [1] * 9 + [2] * 4 + [3] * 3 + [4] * 6)
    centres = torch.randn(CLASSES, dim, generator=generator, dtype=torch.float64)
    rows = centres[labels] + 0.8 * torch.randn(len(labels), dim, generator=generator, dtype=torch.float64)
    return rows - rows.mean(0), labels


def without(rows: Tensor, labels: Tensor, index: int) -> tuple[Tensor, Tensor]:
    keep = torch.arange(len(rows)) != index
    return rows[keep], labels[keep]


@pytest.mark.parametrize("dim", [3, 40])
def test_left_out_ridge_and_scikit_learn(dim: int) -> None:
    rows, labels = some_rows(dim)
    rows = rows + 3  # the intercept has to take it up
    penalty, everything = 0.1, torch.arange(len(rows))
    head = fit_ridge(rows, labels, CLASSES, everything, [penalty])
    weights = len(labels) / (CLASSES * torch.bincount(labels).double())[labels]
    centred = rows - (weights[:, None] * rows).sum(0) / weights.sum()
    strength = penalty * float((weights[:, None] * centred.square()).sum()) / dim
    targets = torch.nn.functional.one_hot(labels, CLASSES).double()

    def reference(keep: Tensor, at: Tensor) -> Tensor:
        model = Ridge(alpha=strength).fit(
            rows[keep].numpy(), targets[keep].numpy(), sample_weight=weights[keep].numpy()
        )
        return torch.from_numpy(model.predict(at.numpy()))

    torch.testing.assert_close(rows @ head.weight + head.bias, reference(everything, rows), atol=1e-8, rtol=0)
    for index in range(len(rows)):
        expected = reference(everything[everything != index], rows[index : index + 1])[0]
        torch.testing.assert_close(head.left_out[index], expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("fit", [fit_rows, fit_ridge])
def test_the_penalty_makes_the_left_out_pictures_likeliest(fit: Callable[..., Any]) -> None:
    rows, labels = some_rows(12)
    choices, everything = [0.01, 0.1, 1.0, 10.0, 1000.0], torch.arange(len(rows))
    costs = []
    for choice in choices:
        scores = fit(rows, labels, CLASSES, everything, [choice]).left_out
        factors = torch.logspace(-4, 3, 300, dtype=torch.float64)
        costs.append(min(float(cross_entropy(factor * scores, labels)) for factor in factors))
    assert fit(rows, labels, CLASSES, everything, choices).penalty == choices[costs.index(min(costs))]
    assert costs.index(min(costs)) not in (0, len(choices) - 1)  # neither end, or the test would show little


def test_the_mix_beats_its_parts_and_ignores_noise() -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(4, (400,), generator=generator)
    truth = torch.nn.functional.one_hot(labels, 4).double()
    first, second, noise = (truth * strength + torch.randn(400, 4, generator=generator) for strength in (1, 1, 0))
    weights = mix([first, 1000 * second, noise], labels)
    assert weights[0] == pytest.approx(1, abs=0.35) and weights[1] == pytest.approx(1e-3, abs=4e-4)
    assert weights[2] < 0.15
    perfect = mix([100 * truth], labels)
    assert torch.isfinite(perfect).all()

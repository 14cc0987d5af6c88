"""Left-out scores equal those of heads that were literally fitted without the picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.covariance import empirical_covariance
from sklearn.linear_model import Ridge
from torch import Tensor
from torch.nn.functional import cross_entropy

from clipcil.heads.novelty import Background, relative_distance
from clipcil.heads.stacked import fit_discriminant, fit_ridge, mix

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


@pytest.mark.parametrize("dim", [3, 7, 40])
def test_left_out_discriminant(dim: int) -> None:
    rows, labels = some_rows(dim)
    shrinkage, everything = 0.3, torch.arange(len(rows))
    found = fit_discriminant(rows, labels, CLASSES, everything, [shrinkage]).left_out
    means = torch.stack([rows[labels == c].mean(0) for c in range(CLASSES)])
    ridge = shrinkage * (rows - means[labels]).square().sum() / dim  # the ridge is that of all pictures
    for index in range(len(rows)):
        left, own = without(rows, labels, index)
        centres = torch.stack([left[own == c].mean(0) for c in range(CLASSES)])
        scatter = len(left) * torch.from_numpy(
            empirical_covariance((left - centres[own]).numpy(), assume_centered=True)
        )
        metric = (len(rows) - CLASSES) * torch.linalg.inv(scatter + ridge * torch.eye(dim, dtype=torch.float64))
        apart = rows[index] - centres
        expected = -0.5 * (apart @ metric * apart).sum(1)
        torch.testing.assert_close(found[index], expected, atol=1e-8, rtol=1e-8)


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


@pytest.mark.parametrize("fit", [fit_discriminant, fit_ridge])
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


def test_the_discriminant_at_its_own_scores() -> None:
    rows, labels = some_rows()
    head = fit_discriminant(rows, labels, CLASSES, torch.arange(len(rows)), [0.5])
    apart = rows[:, None] - head.means
    scatter = sum((torch.outer(z, z) for z in rows - head.means[labels]), torch.zeros(7, 7, dtype=torch.float64))
    metric = (len(rows) - CLASSES) * torch.linalg.inv(
        scatter + 0.5 * scatter.trace() / 7 * torch.eye(7, dtype=torch.float64)
    )
    expected = -0.5 * torch.einsum("ncd,de,nce->nc", apart, metric, apart)
    ours = rows @ head.weight + head.bias
    gap = expected - ours  # the same for every class: the part of the distance that the picture has alone
    torch.testing.assert_close(gap, gap[:, :1].expand_as(gap), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(head.norms, (rows @ metric * rows).sum(1))


def test_classes_of_one_picture_are_the_nearest_mean() -> None:
    rows, labels = torch.eye(4), torch.arange(4)
    head = fit_discriminant(rows, labels, 4, torch.zeros(0, dtype=torch.int64))
    assert torch.equal((rows.double() @ head.weight + head.bias).argmax(1), labels)


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


def test_relative_distance_is_the_dense_formula() -> None:
    rows, labels = some_rows()
    counts, everything = torch.bincount(labels), torch.arange(len(rows))
    head = fit_discriminant(rows, labels, CLASSES, everything, [0.2])
    spread = len(rows) - CLASSES
    scatter = (rows - head.means[labels]).T @ (rows - head.means[labels])
    ridge = 0.2 * scatter.trace() / 7 * torch.eye(7, dtype=torch.float64)
    metric, wide = (spread * torch.linalg.inv(s + ridge) for s in (scatter, rows.T @ rows))
    new = torch.randn(11, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    apart = new[:, None] - head.means
    expected = torch.einsum("ncd,de,nce->nc", apart, metric, apart).amin(1) - (new @ wide * new).sum(1)
    background = Background.of(head, counts)
    ours = relative_distance(new @ head.weight + head.bias, head.bias, background.matrix)
    torch.testing.assert_close(ours, expected, atol=1e-8, rtol=1e-8)
    for index in range(len(rows)):  # the background without picture `index`
        left = rows[everything != index]
        around = left - left.mean(0)
        metric = spread * torch.linalg.inv(around.T @ around + ridge)
        apart = rows[index] - left.mean(0)
        found = background.left_out(head, len(rows))[index]
        torch.testing.assert_close(found, apart @ metric @ apart, atol=1e-8, rtol=1e-8)

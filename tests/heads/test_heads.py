"""Heads against scikit-learn, dense float64 formulas, and fits that literally leave a picture out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.covariance import empirical_covariance
from sklearn.linear_model import Ridge
from torch import Tensor
from torch.nn.functional import cross_entropy

from clipcil.heads.lda import Background, RunningHead, Statistics, fit_rows, relative_distance
from clipcil.heads.stacked import fit_ridge, mix

DIM, CLASSES = 6, 5


def groups(sizes: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(DIM, DIM, generator=generator, dtype=torch.float64)
    centres = 2 * torch.randn(len(sizes), DIM, generator=generator, dtype=torch.float64)
    drawn = [torch.randn(n, DIM, generator=generator, dtype=torch.float64) for n in sizes]
    return [centre + draw @ mix for centre, draw in zip(centres, drawn, strict=True)]


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


def learnt(tasks: list[list[Tensor]], averaged: bool = False) -> RunningHead:
    head = RunningHead(DIM, averaged)
    for part in tasks:
        head.grow(len(part))
        head.add(part)
    return head


def statistics(parts: list[Tensor]) -> Statistics:
    labels = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts]))
    return Statistics.of(torch.cat(parts), labels, len(parts))


def scores(parts: list[Tensor], inputs: Tensor) -> Tensor:
    weight, bias = statistics(parts).fit()
    return inputs @ weight.T + bias


def distances(parts: list[Tensor], inputs: Tensor) -> Tensor:
    means, counts, scatter = statistics(parts)
    count = int(counts.sum())
    covariance = (scatter + scatter.trace() / (count - 1) * torch.eye(len(scatter), dtype=scatter.dtype)) / count
    offsets = inputs[:, None] - means
    return torch.einsum("bcd,de,bce->bc", offsets, torch.linalg.inv(covariance), offsets)


def test_tasks_one_after_another_equal_all_at_once() -> None:
    parts = groups([5, 9, 1, 12, 3])
    whole, split = learnt([parts]), learnt([parts[:2], parts[2:3], parts[3:]])
    torch.testing.assert_close(split.scatter, whole.scatter)
    torch.testing.assert_close(split.weight, whole.weight)
    torch.testing.assert_close(split.bias, whole.bias)
    assert float(split.count) == 30
    assert split(torch.cat(parts).float()).mean(1).abs().max() < 1e-4  # centred


@pytest.mark.parametrize("copies", [1, 3, 7])
@pytest.mark.parametrize("averaged", [False, True])
def test_a_task_of_copies_of_one_picture_harms_no_other_class(averaged: bool, copies: int) -> None:
    """The mean of equal numbers can be off by a rounding, so that their scatter is tiny and not zero."""
    parts = groups([30, 30, 30])
    picture = torch.full((copies, DIM), 0.1, dtype=torch.float64) + torch.arange(DIM)
    inputs, labels = torch.cat(parts).float(), torch.arange(3).repeat_interleave(30)
    for tasks, old in (([parts, [picture]], slice(0, 3)), ([[picture], parts], slice(1, 4))):
        found = learnt(tasks, averaged)(inputs)
        assert found.abs().max() < 1e6
        assert (found[:, old].argmax(1) == labels).double().mean() > 0.8


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("averaged", [False, True])
def test_without_spread_the_nearest_mean_wins(averaged: bool, copies: int) -> None:
    centres = torch.cat(groups([1, 1, 1]))
    parts = [centre.expand(copies, -1) for centre in centres]
    tests = torch.cat(groups([7, 7, 7], seed=4))
    nearest = torch.cdist(tests, centres).argmin(1)
    assert torch.equal(learnt([parts], averaged)(tests.float()).argmax(1), nearest)
    assert torch.equal(scores(parts, tests).argmax(1), nearest)
    alone = fit_rows(centres, torch.arange(3), 3, torch.zeros(0, dtype=torch.int64))
    assert torch.equal((tests @ alone.weight + alone.bias).argmax(1), nearest)
    if copies > 1:
        labels = torch.arange(3).repeat_interleave(copies)
        left_out, _ = statistics(parts).leave_one_out(torch.cat(parts), labels)
        assert torch.isfinite(left_out).all() and torch.equal(left_out.argmax(1), labels)


@pytest.mark.parametrize("sizes", [[9, 4, 2], [2, 2], [40, 3, 12, 2, 7], [2, 1, 1]])
def test_statistics_without_each_picture(sizes: list[int]) -> None:
    parts = groups(sizes)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    found, apart = statistics(parts).leave_one_out(torch.cat(parts), labels)
    assert torch.isfinite(found).all()
    for row, (label, picture) in enumerate(zip(labels.tolist(), torch.cat(parts)[:, None], strict=True)):
        if sizes[label] == 1:  # without the picture there is no such class
            assert int(found[row].argmin()) == label and int(apart[row].argmax()) == label
            continue
        rest = [part[~(part == picture).all(1)] for part in parts]
        score = scores(rest, picture)[0]
        torch.testing.assert_close(found[row], score - score.mean(), rtol=1e-6, atol=1e-6)
        flat = all(len(other) == 1 for other in rest)
        metric = torch.cdist(picture, torch.cat(rest)).square() if flat else distances(rest, picture)
        torch.testing.assert_close(apart[row], metric[0], rtol=1e-6, atol=1e-6)


def test_the_nearest_distance_is_the_least_of_those_to_the_means() -> None:
    parts, tests = groups([40, 3, 12, 2, 7]), torch.cat(groups([5, 5], seed=8))
    torch.testing.assert_close(statistics(parts).nearest_distance(tests), distances(parts, tests).amin(1))


@pytest.mark.parametrize("dim", [3, 7, 40])
def test_rows_left_out(dim: int) -> None:
    rows, labels = some_rows(dim)
    shrinkage, everything = 0.3, torch.arange(len(rows))
    found = fit_rows(rows, labels, CLASSES, everything, [shrinkage]).left_out
    means = torch.stack([rows[labels == c].mean(0) for c in range(CLASSES)])
    ridge = shrinkage * (rows - means[labels]).square().sum() / dim  # the ridge is that of all pictures
    for index in range(len(rows)):
        left, own = without(rows, labels, index)
        centres = torch.stack([left[own == c].mean(0) for c in range(CLASSES)])
        around = (left - centres[own]).numpy()
        scatter = len(left) * torch.from_numpy(empirical_covariance(around, assume_centered=True))
        metric = (len(rows) - CLASSES) * torch.linalg.inv(scatter + ridge * torch.eye(dim, dtype=torch.float64))
        apart = rows[index] - centres
        torch.testing.assert_close(found[index], -0.5 * (apart @ metric * apart).sum(1), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("dim", [7, 40])
def test_rows_scored_and_novelty_by_the_dense_formulas(dim: int) -> None:
    rows, labels = some_rows(dim)
    counts, everything = torch.bincount(labels), torch.arange(len(rows))
    head, spread = fit_rows(rows, labels, CLASSES, everything, [0.2]), len(rows) - CLASSES
    scatter = (rows - head.means[labels]).T @ (rows - head.means[labels])
    ridge = 0.2 * scatter.trace() / dim * torch.eye(dim, dtype=torch.float64)
    metric, wide = (spread * torch.linalg.inv(s + ridge) for s in (scatter, rows.T @ rows))
    torch.testing.assert_close(head.norms, (rows @ metric * rows).sum(1))
    new = torch.randn(11, dim, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    apart = new[:, None] - head.means
    squares, found = torch.einsum("ncd,de,nce->nc", apart, metric, apart), new @ head.weight + head.bias
    gap = -0.5 * squares - found  # the same for every class: the part of the distance that the picture has alone
    torch.testing.assert_close(gap, gap[:, :1].expand_as(gap), atol=1e-9, rtol=1e-9)
    background = Background.of(head, counts)
    ours = relative_distance(found, head.bias, background.matrix)
    torch.testing.assert_close(ours, squares.amin(1) - (new @ wide * new).sum(1), atol=1e-8, rtol=1e-8)
    for index in range(len(rows)):  # the background without picture `index`
        left = rows[everything != index]
        around, apart = left - left.mean(0), rows[index] - left.mean(0)
        metric = spread * torch.linalg.inv(around.T @ around + ridge)
        found = background.left_out(head, len(rows))[index]
        torch.testing.assert_close(found, apart @ metric @ apart, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("dim", [3, 40])
def test_left_out_ridge_and_scikit_learn(dim: int) -> None:
    rows, labels = some_rows(dim)
    rows = rows + 3  # the intercept has to take it up
    penalty, everything = 0.1, torch.arange(len(rows))
    head = fit_ridge(rows, labels, CLASSES, everything, [penalty])
    weights = len(labels) / (CLASSES * torch.bincount(labels).double())[labels]
    centred = rows - (weights @ rows) / weights.sum()
    strength = penalty * float((weights @ centred.square()).sum()) / dim
    targets = torch.nn.functional.one_hot(labels, CLASSES).double()

    def reference(keep: Tensor, at: Tensor) -> Tensor:
        model = Ridge(alpha=strength).fit(rows[keep].numpy(), targets[keep].numpy(), weights[keep].numpy())
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


def test_a_search_that_jumps_far_still_ends_with_weights() -> None:
    """Found among made-up heads: the second hardly helps, and the search once leapt to weights that overflow."""
    generator = torch.Generator().manual_seed(983)
    labels = torch.randint(20, (100,), generator=generator)
    truth = torch.nn.functional.one_hot(labels, 20).double()
    first, second, third = (torch.randn(100, 20, generator=generator).double() for _ in range(3))
    first = first + 1.5 * truth
    tables = [first, first - 0.4 * truth + 0.3 * second, 0.1 * truth + third]
    weights = mix(tables, labels)
    assert torch.isfinite(weights).all() and weights[0] > 10 * weights[1]

"""The discriminant head against scikit-learn and against a direct computation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from clipcil.heads.discriminant import AveragedDiscriminantHead, Discriminant, DiscriminantHead, discriminant

DIM = 6


def groups(sizes: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(DIM, DIM, generator=generator, dtype=torch.float64)
    centres = 2 * torch.randn(len(sizes), DIM, generator=generator, dtype=torch.float64)
    drawn = [torch.randn(n, DIM, generator=generator, dtype=torch.float64) for n in sizes]
    return [centre + draw @ mix for centre, draw in zip(centres, drawn, strict=True)]


def learnt(parts: list[list[Tensor]], kind: type[Discriminant] = DiscriminantHead) -> Any:
    head = kind(DIM)
    for part in parts:
        head.grow(len(part))
        head.add(part)
    return head


def test_posteriors_are_those_of_scikit_learn() -> None:
    """Same ridge, written as scikit-learn's shrinkage: Σ ∝ S/n + r I, where r/(tr(S/n)/d) = s/(1−s)."""
    parts = groups([20, 20, 20, 20])
    count = 80
    scatter = sum((part - part.mean(0)).T @ (part - part.mean(0)) for part in parts)
    weight, bias = discriminant(torch.stack([part.mean(0) for part in parts]), scatter, count)
    ratio = DIM / (count - 1)  # the ridge as a multiple of the mean variance
    shrinkage = ratio / (1 + ratio)
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage, priors=np.full(4, 0.25))
    oracle.fit(torch.cat(parts).numpy(), np.repeat(np.arange(4), 20))
    tests = torch.cat(groups([30, 30, 30, 30], seed=1))
    # (S + tr(S)/(n−1) I)/d is n (1 + ratio)/d times scikit-learn's covariance: undo that scale, which ranks nothing.
    scores = (tests @ weight.T + bias) * count * (1 + ratio) / DIM
    ours = torch.softmax(scores, dim=1).numpy()
    np.testing.assert_allclose(ours, oracle.predict_proba(tests.numpy()), atol=1e-9)


def test_tasks_one_after_another_equal_all_at_once() -> None:
    parts = groups([5, 9, 1, 12, 3])
    whole, split = learnt([parts]), learnt([parts[:2], parts[2:3], parts[3:]])
    torch.testing.assert_close(split.scatter, whole.scatter)
    torch.testing.assert_close(split.weight, whole.weight)
    torch.testing.assert_close(split.bias, whole.bias)
    assert float(split.count) == 30


def test_scores_have_mean_zero_and_find_the_class() -> None:
    parts = groups([40, 40, 40])
    head = learnt([parts])
    scores = head(torch.cat(parts).float())
    torch.testing.assert_close(scores.mean(1), torch.zeros(120), atol=1e-4, rtol=0)
    assert (scores.argmax(1) == torch.arange(3).repeat_interleave(40)).float().mean() > 0.8


def test_one_picture_a_class_is_the_nearest_mean() -> None:
    parts = groups([1, 1, 1])
    head = learnt([parts])
    tests = torch.cat(groups([7, 7, 7], seed=4)).float()
    nearest = torch.cdist(tests, torch.cat(parts).float()).argmin(1)
    assert torch.equal(head(tests).argmax(1), nearest)


@pytest.mark.parametrize("kind", [DiscriminantHead, AveragedDiscriminantHead])
def test_state_loads_into_a_grown_head(kind: type[Discriminant]) -> None:
    head = learnt([groups([4, 4]), groups([4], seed=2)], kind)
    fresh = kind(DIM)
    fresh.grow(3)
    fresh.load_state_dict(head.state_dict())
    inputs = torch.randn(5, DIM)
    assert torch.equal(fresh(inputs), head(inputs))


def test_averaged_head_of_one_task_ranks_as_the_pooled_one() -> None:
    """With a single task there is nothing to average; the scores differ by what all classes share."""
    parts = groups([9, 9, 9, 9])
    ours, authors = learnt([parts]), learnt([parts], AveragedDiscriminantHead)
    tests = torch.cat(groups([5, 5, 5, 5], seed=3))
    scores = authors(tests)
    torch.testing.assert_close(scores - scores.mean(1, keepdim=True), ours(tests), atol=1e-5, rtol=1e-5)


def test_averaged_head_takes_one_picture_a_class() -> None:
    head = learnt([groups([1, 1]), groups([1], seed=2)], AveragedDiscriminantHead)
    assert torch.isfinite(head(torch.randn(3, DIM))).all()


@pytest.mark.parametrize("copies", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("kind", [DiscriminantHead, AveragedDiscriminantHead])
def test_a_task_of_copies_of_one_picture_harms_no_other_class(kind: type[Discriminant], copies: int) -> None:
    """The mean of equal numbers can be off by a rounding, so that their scatter is tiny and not zero."""
    parts = groups([30, 30, 30])
    picture = torch.full((copies, DIM), 0.1, dtype=torch.float64) + torch.arange(DIM)
    inputs, labels = torch.cat(parts).float(), torch.arange(3).repeat_interleave(30)
    for tasks, old in (([parts, [picture]], slice(0, 3)), ([[picture], parts], slice(1, 4))):
        scores = learnt(tasks, kind)(inputs)
        assert scores.abs().max() < 1e6
        assert (scores[:, old].argmax(1) == labels).double().mean() > 0.8


@pytest.mark.parametrize("kind", [DiscriminantHead, AveragedDiscriminantHead])
def test_copies_alone_are_told_apart_by_the_nearest_mean(kind: type[Discriminant]) -> None:
    centres = torch.cat(groups([1, 1, 1]))
    head = learnt([[centre.expand(3, -1) for centre in centres]], kind)
    tests = torch.cat(groups([7, 7, 7], seed=4)).float()
    assert torch.equal(head(tests).argmax(1), torch.cdist(tests, centres.float()).argmin(1))

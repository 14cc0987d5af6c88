"""Herding against iCaRL's loop written out."""

from __future__ import annotations

import pytest
import torch

from clipcil.memory.exemplars import herd


def slow_herd(features: torch.Tensor, count: int) -> list[int]:
    unit = [row / row.norm() for row in features.double()]
    mean = sum(unit) / len(unit)
    chosen: list[int] = []
    while len(chosen) < min(count, len(unit)):
        kept = sum((unit[i] for i in chosen), torch.zeros_like(unit[0]))
        distance = {
            i: float((mean - (kept + row) / (len(chosen) + 1)).norm()) for i, row in enumerate(unit) if i not in chosen
        }
        chosen.append(min(distance, key=distance.__getitem__))
    return chosen


@pytest.mark.parametrize(("size", "dim", "count"), [(1, 4, 1), (7, 3, 4), (30, 16, 20), (60, 8, 60), (5, 8, 20)])
def test_herding_equals_the_loop(size: int, dim: int, count: int) -> None:
    features = torch.randn(size, dim, generator=torch.Generator().manual_seed(size)) * 5 + 0.5
    chosen = herd(features, count)
    assert chosen.tolist() == slow_herd(features, count)
    assert chosen.dtype == torch.int64


def test_a_shorter_memory_is_a_prefix_and_nothing_repeats() -> None:
    features = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(herd(features, 25)[:10], herd(features, 10))
    assert len(set(herd(features, 40).tolist())) == 40


def test_identical_and_zero_rows_are_each_chosen_once() -> None:
    features = torch.cat([torch.ones(3, 4), torch.zeros(2, 4)])
    assert sorted(herd(features, 5).tolist()) == [0, 1, 2, 3, 4]
    assert herd(features, 0).tolist() == []


def test_length_of_a_feature_does_not_matter() -> None:
    features = torch.randn(20, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    lengths = torch.linspace(0.1, 9, 20, dtype=torch.float64)[:, None]
    assert torch.equal(herd(features, 9), herd(features * lengths, 9))


def test_an_empty_feature_is_compared_by_its_own_length() -> None:
    """The mean of four opposite directions is zero, and so is the last row: it is the nearest."""
    features = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [0.0, 0.0]])
    assert int(herd(features, 1)[0]) == 4

"""Exemplars: chosen by herding (against iCaRL's loop), never more than the budget."""

import pytest
import torch

from clipcil.memory.exemplars import Budget, ExemplarMemory, herd


def pictures(labels: list[int], per_class: int = 9, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    every = torch.tensor(labels).repeat_interleave(per_class)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(every), generator=generator)
    return torch.randn(len(every), 6, generator=generator), every[order]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (Budget(20, "dataset"), [18, 20, 18]),  # 9 of 2 (all there are), ⌊20/5⌋ = 4 of 5, ⌊20/6⌋ = 3 of 6
        (Budget(4, "class"), [8, 20, 24]),
        (Budget(5, "dataset"), [4, 5, 0]),  # fewer pictures than classes: none each
        (Budget(0, "class"), [0, 0, 0]),
    ],
)
def test_budget_is_never_exceeded(budget: Budget, expected: list[int]) -> None:
    memory, classes = ExemplarMemory(6, budget), 0
    for task, labels in enumerate(([0, 1], [2, 3, 4], [5])):
        memory.add(*pictures(labels, seed=task))
        classes += len(labels)
        assert len(memory) == expected[task] <= budget.pictures * (classes if budget.per == "class" else 1)
        assert torch.bincount(memory.labels, minlength=classes).unique().numel() == 1  # equal shares
        assert (memory.labels.diff() >= 0).all()


def test_old_sets_are_cut_from_the_end_of_the_herding_order() -> None:
    features, labels = pictures([0, 1])
    memory = ExemplarMemory(6, Budget(12, "dataset"))
    memory.add(features, labels)
    own = features[labels == 1]
    assert torch.equal(memory.features[6:], own[herd(own, 6)])
    memory.add(*pictures([2, 3], seed=1))
    assert torch.equal(memory.features[3:6], own[herd(own, 3)])


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
    assert chosen.tolist() == slow_herd(features, count) and chosen.dtype == torch.int64
    assert torch.equal(herd(features, count // 2), chosen[: count // 2])  # a shorter memory is a prefix
    copies = torch.cat([torch.ones(3, 4), torch.zeros(2, 4)])  # no direction, or one: each is chosen once
    assert sorted(herd(copies, 5).tolist()) == [0, 1, 2, 3, 4] and not len(herd(copies, 0))

"""Exemplars: chosen by herding, never more than the budget, the same after a checkpoint."""

from __future__ import annotations

import pytest
import torch

from clipcil.errors import UserError
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
        assert len(memory) == expected[task] <= memory.budget(classes)
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


def test_raw_features_are_kept_not_unit_ones() -> None:
    features, labels = pictures([0])
    memory = ExemplarMemory(6, Budget(9, "class"))
    memory.add(7 * features, labels)
    assert torch.equal(memory.features.norm(dim=1).sort().values, (7 * features).norm(dim=1).sort().values)


def test_classes_with_few_pictures_give_what_they_have() -> None:
    memory = ExemplarMemory(6, Budget(3, "class"))
    memory.add(torch.randn(6, 6), torch.tensor([0, 1, 1, 2, 2, 2]))
    assert memory.labels.tolist() == [0, 1, 1, 2, 2, 2]


def test_join_puts_the_exemplars_behind_the_task() -> None:
    memory = ExemplarMemory(6, Budget(2, "class"))
    memory.add(*pictures([0, 1]))
    features, labels = pictures([2], seed=3)
    joined, every = memory.join(features, labels)
    assert torch.equal(joined[:9], features) and torch.equal(joined[9:], memory.features)
    assert every.tolist() == [2] * 9 + [0, 0, 1, 1]


def test_a_fresh_memory_loads_any_other() -> None:
    memory = ExemplarMemory(6, Budget(10, "dataset"))
    memory.add(*pictures([0, 1]))
    fresh = ExemplarMemory(6, Budget(10, "dataset"))
    fresh.load_state_dict(memory.state_dict())
    for more in (memory, fresh):
        more.add(*pictures([2, 3], seed=4))
    assert torch.equal(memory.features, fresh.features) and torch.equal(memory.labels, fresh.labels)
    assert int(fresh.classes) == 4 and len(fresh) == 8


def test_a_state_taken_earlier_does_not_change() -> None:
    memory = ExemplarMemory(6, Budget(2, "class"))
    memory.add(*pictures([0, 1]))
    state = memory.state_dict()
    memory.add(*pictures([2], seed=1))
    assert int(state["classes"]) == 2 and len(state["labels"]) == 4


def test_wrong_use_is_refused() -> None:
    memory = ExemplarMemory(6, Budget(2, "class"))
    memory.add(*pictures([0, 1]))
    with pytest.raises(ValueError, match="already has exemplars"):
        memory.add(*pictures([1, 2]))
    with pytest.raises(UserError, match=r"memory\.pictures"):
        Budget(-1)

"""A memory whose parts do not fit each other is refused when it is loaded, not when the next class is learnt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from clipcil.memory.exemplars import Budget, ExemplarMemory
from clipcil.memory.gaussians import AffineMap, GaussianMemory
from clipcil.memory.rows import FeatureRows


def gaussians() -> GaussianMemory:
    memory = GaussianMemory()
    memory.add([torch.randn(4, 6), torch.randn(3, 6)])
    memory.transport(AffineMap(torch.eye(6), torch.ones(6)))
    memory.add([torch.randn(9, 6)])
    return memory


def exemplars(count: int = 8) -> ExemplarMemory:
    memory = ExemplarMemory(6, Budget(20))
    if count:
        memory.add(torch.randn(count, 6), torch.arange(count) // 4)
    return memory


def rows(count: int = 8) -> FeatureRows:
    memory = FeatureRows((4, 2), 10)
    if count:
        memory.add(torch.randn(count, 6), torch.arange(count) // 4)
    return memory


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "gaussians": (gaussians, GaussianMemory),
    "exemplars": (exemplars, lambda: exemplars(0)),
    "rows": (rows, lambda: rows(0)),
}


def changes(value: Tensor) -> list[Tensor]:
    if not value.ndim:
        return [value[None, None]]  # torch takes one of a single dimension for the number in it
    return [value[:-1], value[:0], value[None], *([value[:, :-1], value.flatten()] if value.ndim > 1 else [])]


@pytest.mark.parametrize("case", CASES)
def test_parts_that_do_not_fit_each_other(case: str) -> None:
    make, fresh = CASES[case]
    state = make().state_dict()
    fresh().load_state_dict(state)
    for name, value in state.items():
        for changed in changes(value):
            with pytest.raises((RuntimeError, ValueError)):
                fresh().load_state_dict({**state, name: changed})
                pytest.fail(f"{name} of shape {tuple(changed.shape)} was taken")


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [
        ("gaussians", "space_of", -1),
        ("gaussians", "space_of", 2),
        ("gaussians", "counts", 0),
        ("gaussians", "ranks", -4),
        ("exemplars", "labels", -1),
        ("exemplars", "labels", 2),
        ("exemplars", "classes", 1),
        ("rows", "counts", 5),
    ],
)
def test_numbers_that_cannot_be(case: str, name: str, value: int) -> None:
    make, fresh = CASES[case]
    state = make().state_dict()
    state[name] = state[name].clone()
    state[name].view(-1)[0] = value
    with pytest.raises(ValueError, match=r"\w"):
        fresh().load_state_dict(state)

"""A memory whose parts do not fit each other is refused when it is loaded, not when the next class is learnt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from clipcil.memory.exemplars import Budget, ExemplarMemory
from clipcil.memory.gaussians import AffineMap, GaussianMemory
from clipcil.memory.rows import FeatureRows

Make = Callable[[], nn.Module]


def gaussians() -> GaussianMemory:
    memory = GaussianMemory()
    memory.add([torch.randn(4, 6), torch.randn(3, 6)])
    memory.transport(AffineMap(torch.eye(6), torch.ones(6)))
    memory.add([torch.randn(9, 6)])
    return memory


def exemplars() -> ExemplarMemory:
    memory = ExemplarMemory(6, Budget(20))
    memory.add(torch.randn(8, 6), torch.arange(8) // 4)
    return memory


def rows() -> FeatureRows:
    memory = FeatureRows((4, 2), 10)
    memory.add(torch.randn(8, 6), torch.arange(8) // 4)
    return memory


CASES: dict[str, tuple[Make, Make]] = {
    "gaussians": (gaussians, GaussianMemory),
    "exemplars": (exemplars, lambda: ExemplarMemory(6, Budget(20))),
    "rows": (rows, lambda: FeatureRows((4, 2), 10)),
}


def changes(value: Tensor) -> dict[str, Tensor]:
    if not value.ndim:
        return {"with two dimensions": value[None, None]}  # torch takes one of a single dimension for the number in it
    found = {"one row less": value[:-1], "none": value[:0], "with a dimension": value[None]}
    return found | ({"narrower": value[:, :-1], "flat": value.flatten()} if value.ndim > 1 else {})


@pytest.mark.parametrize("case", CASES)
def test_parts_that_do_not_fit_each_other(case: str) -> None:
    make, fresh = CASES[case]
    state = make().state_dict()
    fresh().load_state_dict(state)
    for name, value in state.items():
        for how, changed in changes(value).items():
            with pytest.raises((RuntimeError, ValueError)):
                fresh().load_state_dict({**state, name: changed})
                pytest.fail(f"{name} {how} was taken")


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
    state[name] = state[name].clone().index_fill_(0, torch.tensor([0]), value) if state[name].ndim else state[name] * 0
    with pytest.raises(ValueError, match=r"\w"):
        fresh().load_state_dict(state)

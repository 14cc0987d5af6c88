"""The state of every memory: complete, a copy, and refused if its parts do not fit each other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from clipcil.memory.exemplars import Budget, ExemplarMemory
from clipcil.memory.gaussians import AffineMap, GaussianMemory
from clipcil.memory.rows import FeatureRows

FRESH: dict[str, Callable[[], Any]] = {
    "gaussians": GaussianMemory,
    "exemplars": lambda: ExemplarMemory(6, Budget(10)),
    "rows": lambda: FeatureRows((4, 2), 10),
}


def learn(memory: Any, first: int) -> Any:
    """Two classes more, of which `first` is the first, the same for the same number; Gaussians are carried, too."""
    features = torch.randn(8, 6, generator=torch.Generator().manual_seed(first))
    if isinstance(memory, GaussianMemory):
        memory.add(features.split((5, 3)))
        memory.transport(AffineMap(torch.eye(6), torch.ones(6)))
    else:
        memory.add(features, first + torch.arange(8) // 4)
    return memory


def make(case: str) -> Any:
    memory = learn(FRESH[case](), 0)
    if case == "gaussians":
        memory.add([torch.randn(9, 6)])  # a class of the newest space
    return memory


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("target", ["fresh", "used"])
@pytest.mark.parametrize("case", FRESH)
def test_a_memory_goes_on_from_a_state_which_does_not_change(case: str, target: str) -> None:
    source, loaded = make(case), FRESH[case]()
    if target == "used":
        learn(learn(loaded, 4 if case == "gaussians" else 0), 2)
    state = source.state_dict()
    copies = {name: value.clone() for name, value in state.items()}
    loaded.load_state_dict(state)
    for memory in (source, loaded):
        learn(memory, 2)
    assert same(source.state_dict(), loaded.state_dict()) and len(source) == len(loaded)
    for memory in (source, loaded):
        if not isinstance(memory, ExemplarMemory):  # which forgets nothing
            memory.remove(0)
    assert same(state, copies) and not same(state, source.state_dict())


def changes(value: Tensor) -> list[Tensor]:
    if not value.ndim:
        return [value[None, None]]  # torch takes one of a single dimension for the number in it
    return [value[:-1], value[:0], value[None], *([value[:, :-1], value.flatten()] if value.ndim > 1 else [])]


@pytest.mark.parametrize("case", FRESH)
def test_parts_that_do_not_fit_each_other(case: str) -> None:
    state = make(case).state_dict()
    for name, value in state.items():
        for changed in changes(value):
            with pytest.raises((RuntimeError, ValueError)):
                FRESH[case]().load_state_dict({**state, name: changed})
                pytest.fail(f"{name} of shape {tuple(changed.shape)} was taken")


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [
        *[("gaussians", "space_of", -1), ("gaussians", "space_of", 2), ("gaussians", "counts", 0)],
        *[("gaussians", "ranks", -4), ("exemplars", "labels", -1), ("exemplars", "labels", 2)],
        *[("exemplars", "classes", 1), ("rows", "counts", 5)],
    ],
)
def test_numbers_that_cannot_be(case: str, name: str, value: int) -> None:
    state = make(case).state_dict()
    state[name] = state[name].clone()
    state[name].view(-1)[0] = value
    with pytest.raises(ValueError, match=r"\w"):
        FRESH[case]().load_state_dict(state)

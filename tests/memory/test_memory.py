"""What the Gaussian memory promises beside its arithmetic: labels, checkpoints, casts, errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clipcil.errors import UserError
from clipcil.memory.gaussians import AffineMap, GaussianMemory
from clipcil.memory.sampler import MANY

DIM = 8


def features(seed: int, count: int, dim: int = DIM) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)) + seed


def a_map(seed: int) -> AffineMap:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.eye(DIM) + 0.1 * torch.randn(DIM, DIM, generator=generator)
    return AffineMap(matrix.double(), torch.randn(DIM, generator=generator).double())


def grown() -> GaussianMemory:
    """Six classes of three tasks: ragged, one single picture, one with n > d, two maps, the last task not carried."""
    memory = GaussianMemory()
    memory.add([features(0, 5), features(1, 1)])
    memory.transport(a_map(0))
    memory.add([features(2, 20)])
    memory.transport(a_map(1))
    memory.add([features(3, 2), features(4, 3), features(5, 4)])
    return memory


def seeded(memory: GaussianMemory, classes: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(11)
    return memory.sample(classes)


def test_counts_tasks_and_order() -> None:
    memory = grown()
    assert len(memory) == 6
    assert memory.counts.tolist() == [5, 1, 20, 2, 3, 4]
    assert memory.task_of.tolist() == [0, 0, 1, 2, 2, 2]
    assert memory.task_of.dtype == torch.int64
    assert torch.allclose(memory.means()[4], features(4, 3).double().mean(0))


def test_same_seed_same_draws() -> None:
    memory, classes = grown(), torch.tensor([5, 0, 2, 2, 1, 0, 3])
    first = seeded(memory, classes)
    assert torch.equal(first, seeded(memory, classes))
    assert not torch.equal(first, memory.sample(classes))
    assert first.dtype == torch.float32
    assert first.shape == (7, DIM)


def test_draws_belong_to_their_rows() -> None:
    memory = GaussianMemory()
    memory.add([torch.full((1, 4), 10.0), torch.full((1, 4), -20.0), torch.full((1, 4), 30.0)])
    memory.transport(AffineMap(2 * torch.eye(4).double(), torch.ones(4).double()))
    memory.add([torch.full((1, 4), 5.0)])
    classes = torch.tensor([3, 1, 2, 0, 0, 3, 1])
    want = torch.tensor([21.0, -39.0, 61.0, 5.0])[classes]
    assert torch.allclose(memory.sample(classes).mean(1), want, rtol=0.05)


def test_few_and_many_draws_per_class_agree() -> None:
    """Two ways of mixing rows, chosen by the number of draws, use the random numbers alike."""
    sampler = grown()._sampler(torch.float64)
    classes = torch.arange(6).repeat_interleave(MANY)
    draws = []
    for part in (classes, classes[:-1]):
        torch.manual_seed(5)
        mixed = torch.zeros(len(part), DIM, dtype=torch.float64)
        sampler._mix_rows(part, mixed)
        draws.append(mixed)
    assert len(draws[0]) == MANY * 6 > len(draws[1])
    assert torch.allclose(draws[0][:-MANY], draws[1][: 1 - MANY], atol=1e-12)
    assert draws[0].abs().max() > 0.1


def test_no_draws() -> None:
    assert grown().sample(torch.empty(0, dtype=torch.int64)).shape == (0, DIM)


@pytest.mark.parametrize("wrong", [-1, 6])
def test_unknown_class_is_an_error(wrong: int) -> None:
    memory = grown()
    with pytest.raises(IndexError):
        memory.sample(torch.tensor([0, wrong]))
    with pytest.raises(IndexError):
        memory.remove(wrong)


def test_draws_follow_every_change() -> None:
    memory, classes = grown(), torch.arange(6)
    before = seeded(memory, classes)
    memory.transport(a_map(2))
    carried = seeded(memory, classes)
    assert not torch.allclose(before, carried)
    assert torch.allclose(carried.double(), a_map(2)(before.double()), atol=1e-4)
    memory.merge(3, features(30, 4))
    assert not torch.allclose(seeded(memory, classes)[3], carried[3])


def test_removing_a_class_moves_the_later_ones_down() -> None:
    memory = grown()
    wanted = [memory.moments(index) for index in (0, 1, 3, 4, 5)]
    memory.remove(2)
    assert len(memory) == 5
    assert memory.task_of.tolist() == [0, 0, 2, 2, 2]
    assert len(memory.matrices) == 1  # nobody is left in the second space
    for index, (mean, cov) in enumerate(wanted):
        assert torch.equal(memory.moments(index)[0], mean)
        assert torch.equal(memory.moments(index)[1], cov)
    memory.add([features(9, 3)])
    assert memory.task_of.tolist() == [0, 0, 2, 2, 2, 3]
    before = memory.means().clone()
    memory.transport(a_map(5))
    assert len(memory.matrices) == 2
    assert torch.allclose(memory.means(), a_map(5)(before), atol=1e-12)
    memory.remove(0)
    memory.remove(0)  # the first space goes, the second becomes the first
    assert torch.allclose(memory.means(), a_map(5)(before)[2:], atol=1e-12)


def test_an_emptied_memory_can_be_filled_again() -> None:
    memory = GaussianMemory()
    memory.add([features(0, 3)])
    memory.remove(0)
    memory.transport(a_map(0))
    assert len(memory) == 0
    memory.add([features(1, 4)])
    assert torch.allclose(memory.means()[0], features(1, 4).double().mean(0))


def test_a_frozen_tower_stores_no_matrices() -> None:
    memory = GaussianMemory()
    for task in range(5):
        memory.add([features(task, 4)])
    assert memory.matrices.numel() == 0
    assert memory.task_of.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("target", [GaussianMemory(), None])
def test_state_round_trips_into_any_memory(target: GaussianMemory | None) -> None:
    source = grown()
    target = grown() if target is None else target
    if len(target):
        target.add([features(7, 3)])
        target.sample(torch.tensor([0]))
    result = target.load_state_dict(source.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    assert len(target) == 6
    classes = torch.tensor([5, 1, 0, 2, 2, 4])
    assert torch.equal(seeded(target, classes), seeded(source, classes))
    for memory in (source, target):
        memory.transport(a_map(3))
        memory.add([features(8, 3)])
    assert torch.equal(source.means(), target.means())
    assert torch.equal(source.task_of, target.task_of)


def test_state_taken_earlier_does_not_change() -> None:
    memory = grown()
    state = memory.state_dict()
    copies = {name: value.clone() for name, value in state.items()}
    memory.add([features(8, 3)])
    memory.transport(a_map(3))
    memory.remove(0)
    assert all(torch.equal(state[name], value) for name, value in copies.items())


def test_state_round_trips_as_a_submodule() -> None:
    holder, other = nn.ModuleDict({"memory": grown()}), nn.ModuleDict({"memory": GaussianMemory()})
    other.load_state_dict(holder.state_dict())
    assert torch.equal(other["memory"].means(), holder["memory"].means())  # type: ignore[operator]


def test_casting_the_model_keeps_float64_statistics() -> None:
    memory, reference = grown(), grown()
    nn.ModuleDict({"memory": memory}).to(torch.float16)
    assert memory.rows.dtype == memory.matrices.dtype == torch.float64
    assert torch.equal(memory.means(), reference.means())


def test_moving_to_another_device_takes_the_buffers_along() -> None:
    memory = grown().to("meta")
    assert memory.rows.device.type == memory.matrices.device.type == "meta"
    assert memory.rows.dtype == torch.float64


def test_mixed_precision_does_not_round_the_draws() -> None:
    memory, classes = grown(), torch.arange(6)
    plain = seeded(memory, classes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = seeded(memory, classes)
    assert torch.equal(plain, mixed)
    assert memory.sample(classes, torch.bfloat16).dtype == torch.bfloat16


def test_no_gradient_reaches_the_features() -> None:
    memory = GaussianMemory()
    memory.add([features(0, 3).requires_grad_()])
    memory.merge(0, features(1, 3).requires_grad_())
    assert not memory.rows.requires_grad
    assert not memory.sample(torch.tensor([0])).requires_grad


@pytest.mark.parametrize("bad", [torch.zeros(0, DIM), torch.full((2, DIM), torch.nan), torch.zeros(DIM)])
def test_unusable_features_are_refused_and_change_nothing(bad: torch.Tensor) -> None:
    memory = grown()
    with pytest.raises(UserError):
        memory.add([features(0, 3), bad])
    assert len(memory) == 6
    assert int(memory.tasks) == 3


def test_features_of_another_width_are_refused() -> None:
    memory = grown()
    with pytest.raises(RuntimeError):
        memory.add([features(0, 3, DIM + 1)])
    with pytest.raises(RuntimeError):
        memory.transport(AffineMap(torch.eye(3).double(), torch.zeros(3).double()))
    assert len(memory) == len(memory.counts) == 6

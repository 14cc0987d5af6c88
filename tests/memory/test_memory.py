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
    assert torch.allclose(memory.means()[4], features(4, 3).double().mean(0))


def test_same_seed_same_draws() -> None:
    memory, classes = grown(), torch.tensor([5, 0, 2, 2, 1, 0, 3])
    first = seeded(memory, classes)
    assert torch.equal(first, seeded(memory, classes)) and not torch.equal(first, memory.sample(classes))
    assert first.dtype == torch.float32 and first.shape == (7, DIM)
    assert memory.sample(classes[:0]).shape == (0, DIM)
    assert not first.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):  # mixed precision does not round the draws
        assert torch.equal(first, seeded(memory, classes))


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
    memory, classes = grown(), torch.arange(6).repeat_interleave(MANY)
    memory.sample(classes)
    assert memory._sampler is not None
    draws = []
    for part in (classes, classes[:-1]):
        torch.manual_seed(5)
        draws.append(torch.zeros(len(part), DIM))
        memory._sampler._mix_rows(part, draws[-1])
    assert torch.allclose(draws[0][:-MANY], draws[1][: 1 - MANY], atol=1e-5) and draws[0].abs().max() > 0.1


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
    assert len(memory) == 5 and memory.task_of.tolist() == [0, 0, 2, 2, 2]
    assert len(memory.matrices) == 1  # nobody is left in the second space
    for index, moments in enumerate(wanted):
        assert all(torch.equal(one, other) for one, other in zip(memory.moments(index), moments, strict=True))
    memory.add([features(9, 3)])
    assert memory.task_of.tolist() == [0, 0, 2, 2, 2, 3]
    before = memory.means().clone()
    memory.transport(a_map(5))
    assert len(memory.matrices) == 2 and torch.allclose(memory.means(), a_map(5)(before), atol=1e-12)
    memory.remove(0)
    memory.remove(0)  # the first space goes, the second becomes the first
    assert torch.allclose(memory.means(), a_map(5)(before)[2:], atol=1e-12)


def test_an_emptied_memory_can_be_filled_again() -> None:
    memory = GaussianMemory()
    memory.add([features(0, 3)])
    memory.remove(0)
    memory.transport(a_map(0))
    memory.add([features(1, 4)])
    assert len(memory) == 1 and torch.allclose(memory.means()[0], features(1, 4).double().mean(0))


def test_a_frozen_tower_stores_no_matrices() -> None:
    memory = GaussianMemory()
    for task in range(5):
        memory.add([features(task, 4)])
    assert memory.matrices.numel() == 0
    assert memory.task_of.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("target", [GaussianMemory(), grown()])
def test_state_round_trips_into_any_memory(target: GaussianMemory) -> None:
    source, classes = grown(), torch.tensor([5, 1, 0, 2, 2, 4])
    if len(target):
        target.add([features(7, 3)])
        target.sample(torch.tensor([0]))
    holder = nn.ModuleDict({"memory": target})
    holder.load_state_dict({f"memory.{name}": value for name, value in source.state_dict().items()})
    assert len(target) == 6 and torch.equal(seeded(target, classes), seeded(source, classes))
    for memory in (source, target):
        memory.transport(a_map(3))
        memory.add([features(8, 3)])
    assert torch.equal(source.means(), target.means()) and torch.equal(source.task_of, target.task_of)


def test_state_taken_earlier_does_not_change() -> None:
    memory = grown()
    state = memory.state_dict()
    copies = {name: value.clone() for name, value in state.items()}
    memory.add([features(8, 3)])
    memory.transport(a_map(3))
    memory.remove(0)
    assert all(torch.equal(state[name], value) for name, value in copies.items())


def test_a_cast_keeps_float64_statistics_and_a_move_takes_them_along() -> None:
    memory, reference = grown(), grown()
    nn.ModuleDict({"memory": memory}).to(torch.float16)
    assert memory.rows.dtype == memory.matrices.dtype == torch.float64
    assert torch.equal(memory.means(), reference.means())
    memory.to("meta")
    assert memory.rows.device.type == memory.matrices.device.type == "meta" and memory.rows.dtype == torch.float64


def test_no_gradient_reaches_the_features() -> None:
    memory = GaussianMemory()
    memory.add([features(0, 3).requires_grad_()])
    memory.merge(0, features(1, 3).requires_grad_())
    assert not memory.rows.requires_grad


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (torch.zeros(0, DIM), UserError),
        (torch.full((2, DIM), torch.nan), UserError),
        (torch.zeros(DIM), UserError),
        (torch.zeros(3, DIM + 1), RuntimeError),
    ],
)
def test_unusable_features_are_refused_and_change_nothing(bad: torch.Tensor, error: type[Exception]) -> None:
    memory = grown()
    state = {name: value.clone() for name, value in memory.state_dict().items()}
    with pytest.raises(error):
        memory.add([features(0, 3), bad])
    with pytest.raises(RuntimeError):
        memory.transport(AffineMap(torch.eye(3).double(), torch.zeros(3).double()))
    assert all(torch.equal(value, state[name]) for name, value in memory.state_dict().items())


def some_maps(scale: float, noise: float) -> list[torch.Tensor]:
    """Three maps: scaled rotations, and noise beside them."""
    drawn = [torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(seed)).double() for seed in range(3)]
    return [scale * torch.linalg.qr(matrix).Q + noise * matrix for matrix in drawn]


@pytest.mark.parametrize("keep", [0, 2, 3])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_folding_leaves_fewer_maps_and_is_exact_but_for_the_isotropic_part_of_a_distortion(
    noise: float, keep: int
) -> None:
    plain, folded = GaussianMemory(), GaussianMemory()
    for memory in (plain, folded):
        for task, matrix in enumerate(some_maps(1.1, noise)):
            memory.add([features(2 * task, 4), features(2 * task + 1, 4)])
            memory.transport(AffineMap(matrix, torch.ones(DIM).double()))
        memory.add([features(9, 4)])
    folded.fold(keep)
    assert len(folded.matrices) == keep
    for memory in (plain, folded):
        memory.transport(a_map(0))  # later maps act on what was folded, too
    torch.testing.assert_close(folded.means(), plain.means(), atol=1e-10, rtol=1e-10)
    for index in range(7):
        one, other = plain.moments(index)[1], folded.moments(index)[1]
        exact = not noise or index >= 2 * (3 - keep)
        bound = 1e-10 if exact else 4 * DIM * float(plain.noises[index])
        assert float((one - other).norm()) <= bound

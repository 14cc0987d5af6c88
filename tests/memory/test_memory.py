"""What the Gaussian memory promises beside its arithmetic: labels, draws, casts, errors."""

import pytest
import torch
from torch import nn

from clipcil.errors import UserError
from clipcil.memory import gaussians
from clipcil.memory.gaussians import AffineMap, GaussianMemory

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


def test_counts_tasks_and_order_and_a_frozen_tower_stores_no_matrices() -> None:
    memory = grown()
    assert memory.counts.tolist() == [5, 1, 20, 2, 3, 4]
    assert memory.task_of.tolist() == [0, 0, 1, 2, 2, 2]
    assert torch.allclose(memory.means()[4], features(4, 3).double().mean(0))
    frozen = GaussianMemory()
    for task in range(5):
        frozen.add([features(task, 4).requires_grad_()])
    frozen.merge(0, features(1, 3).requires_grad_())
    assert frozen.matrices.numel() == 0 and frozen.task_of.tolist() == [0, 1, 2, 3, 4]
    assert not frozen.rows.requires_grad


def test_same_seed_same_draws() -> None:
    memory, classes = grown(), torch.tensor([5, 0, 2, 2, 1, 0, 3])
    first = seeded(memory, classes)
    assert torch.equal(first, seeded(memory, classes)) and not torch.equal(first, memory.sample(classes))
    assert first.dtype == torch.float32 and first.shape == (7, DIM)
    assert memory.sample(classes[:0]).shape == (0, DIM) and not first.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):  # mixed precision does not round the draws
        assert torch.equal(first, seeded(memory, classes))


def test_few_and_many_draws_per_class_are_mixed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = []
    for many in (1, 100):
        monkeypatch.setattr(gaussians, "MANY", many)
        draws.append(seeded(grown(), torch.arange(6).repeat(5)))
    assert torch.allclose(*draws, atol=1e-5) and not torch.equal(*draws)


def test_draws_follow_every_change() -> None:
    memory, classes = grown(), torch.arange(6)
    before = seeded(memory, classes)
    memory.transport(a_map(2))
    carried = seeded(memory, classes)
    assert not torch.allclose(before, carried)
    assert torch.allclose(carried.double(), a_map(2)(before.double()), atol=1e-4)
    memory.merge(3, features(30, 4))
    assert not torch.allclose(seeded(memory, classes)[3], carried[3])
    other = GaussianMemory()
    other.add([features(seed, 5) for seed in range(6)])
    other.sample(classes)
    other.load_state_dict(memory.state_dict())
    assert torch.equal(seeded(other, classes), seeded(memory, classes))
    sharp = GaussianMemory()
    sharp.add([1e-6 * features(0, 20), 1e-6 * features(0, 20) + 1])
    sharp.sample(classes[:2])
    sharp.shift(torch.full((2, DIM), 3.0))
    expected = torch.tensor([[3.0], [4.0]]).expand(2, DIM)
    torch.testing.assert_close(sharp.sample(classes[:2]), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(sharp.means().float(), expected, atol=1e-4, rtol=0)


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
    while len(memory):
        memory.remove(0)
    memory.transport(a_map(0))
    memory.add([features(1, 4)])  # an emptied memory can be filled again
    assert torch.allclose(memory.means(), features(1, 4).double().mean(0, keepdim=True))


def test_a_cast_keeps_float64_statistics_and_a_move_takes_them_along() -> None:
    memory, reference = grown(), grown()
    nn.ModuleDict({"memory": memory}).to(torch.float16)
    assert memory.rows.dtype == memory.matrices.dtype == torch.float64
    assert torch.equal(memory.means(), reference.means())
    memory.to("meta")
    assert memory.rows.device.type == memory.matrices.device.type == "meta" and memory.rows.dtype == torch.float64


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        *[(value, UserError) for value in (torch.zeros(0, DIM), torch.full((2, DIM), torch.nan), torch.zeros(DIM))],
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

"""Each calibration against dense float64 formulas, and leave-one-out against literally leaving one out."""

import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor

from clipcil import transport
from clipcil.memory.gaussians import AffineMap, GaussianMemory
from clipcil.memory.ledoit_wolf import average_moments
from clipcil.transport import bures_map, paired_map, sdc_shifts, transport_memory

DIM = 6


Moved = tuple[GaussianMemory, list[Tensor], list[Tensor]]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def moved() -> Moved:
    """A memory of two classes, and a new task of three whose features were bent by the move."""
    memory = GaussianMemory()
    memory.add([drawn(20, DIM, seed=1), drawn(4, DIM, seed=2) + 1])
    before = [drawn(30, DIM, seed=seed) + seed - 4 for seed in (3, 4, 5)]
    matrix = torch.eye(DIM, dtype=torch.float64) + 0.2 * drawn(DIM, DIM, seed=6)
    return memory, before, [group @ matrix.T + 0.5 + 0.05 * group.square() for group in before]


def expected_map(name: str, before: list[Tensor], after: list[Tensor]) -> AffineMap:
    if name == "task":  # bures_map itself is held to POT in tests/oracle
        return bures_map(*average_moments(before), *average_moments(after))
    if name == "class":
        each = [bures_map(*average_moments([b]), *average_moments([a])) for b, a in zip(before, after, strict=True)]
        return AffineMap(sum(m.matrix for m in each) / 3, sum(m.offset for m in each) / 3)  # type: ignore[arg-type]
    return paired_map(torch.cat(before), torch.cat(after))


@pytest.mark.parametrize("name", ["task", "class", "pairs"])
def test_a_map_carries_means_and_covariances(name: str, moved: Moved) -> None:
    memory, before, after = moved
    old, expected = list(map(memory.moments, range(2))), expected_map(name, before, after)
    transport_memory(name, memory, before, after)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be shifted"):  # what a map has carried
        transport_memory("sdc", memory, before, after)
    for (mean, cov), (old_mean, old_cov) in zip(map(memory.moments, range(2)), old, strict=True):
        torch.testing.assert_close(mean, expected(old_mean), atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(cov, expected.matrix @ old_cov @ expected.matrix.T, atol=1e-10, rtol=1e-10)


def test_sdc_moves_each_mean_by_its_neighbours(moved: Moved) -> None:
    memory, before, after = moved
    old, x, y = list(map(memory.moments, range(2))), torch.cat(before), torch.cat(after)
    transport_memory("sdc", memory, before, after)
    for (mean, cov), (old_mean, old_cov) in zip(map(memory.moments, range(2)), old, strict=True):
        weights = torch.stack([torch.exp(-(row - old_mean).square().sum() / (2 * 0.2**2)) for row in x])
        shift = sum(w * (b - a) for w, a, b in zip(weights, x, y, strict=True)) / weights.sum()
        torch.testing.assert_close(mean, old_mean + shift, atol=1e-6, rtol=1e-6)
        assert torch.equal(cov, old_cov)
    far = sdc_shifts(torch.full((1, DIM), 1e3, dtype=torch.float64), x, y)
    assert far.isfinite().all()  # every weight would round to zero without the softmax's care


@pytest.mark.parametrize("count", [5, 40])
def test_pairs_choose_the_ridge_by_literally_leaving_one_out(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn(count, DIM)
    after = before + 0.3 * before @ drawn(DIM, DIM, seed=1) + 0.4 * drawn(count, DIM, seed=2)
    ridges = [1e-4, 1e-2, 1e-1, 1.0, 100.0]
    level = (before - before.mean(0)).square().sum() / DIM
    errors, everything = [], torch.arange(count)
    for ridge in ridges:
        error = 0.0
        for index in range(count):
            keep = everything != index
            model = Ridge(alpha=float(ridge * level)).fit(before[keep].numpy(), (after - before)[keep].numpy())
            missed = (after - before)[index] - torch.from_numpy(model.predict(before[index : index + 1].numpy())[0])
            error += float(missed.square().sum())
        errors.append(error)
    best = ridges[errors.index(min(errors))]
    monkeypatch.setattr(transport, "RIDGES", ridges)
    found = paired_map(before, after)
    model = Ridge(alpha=float(best * level)).fit(before.numpy(), (after - before).numpy())
    expected = before + torch.from_numpy(model.predict(before.numpy()))
    torch.testing.assert_close(found(before), expected, atol=1e-10, rtol=1e-10)


def test_pairs_find_an_exact_map_and_fall_back_to_a_shift() -> None:
    points, matrix = drawn(400, DIM), drawn(DIM, DIM, seed=3)
    found = paired_map(points, points @ matrix.T + 2.0)
    torch.testing.assert_close(found.matrix, matrix, atol=1e-4, rtol=0)
    one = paired_map(points[:1], points[:1] + 3.0)
    torch.testing.assert_close(one(points), points + 3.0)
    same = paired_map(points, points)
    torch.testing.assert_close(same.matrix, torch.eye(DIM, dtype=torch.float64))

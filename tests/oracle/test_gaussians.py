"""Low-rank Ledoit–Wolf and the transportable memory against scikit-learn and dense float64 computations."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.covariance import ledoit_wolf

from clipcil.memory.gaussians import AffineMap, GaussianMemory
from clipcil.memory.ledoit_wolf import SPREAD_FLOOR, average_moments, floor_level, summarise


def made_up(seed: int, count: int, dim: int, power: float = 0.5) -> torch.Tensor:
    """Features with a mean away from zero and unequal variances."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.arange(1, dim + 1, dtype=torch.float64).pow(-power)
    centre = torch.randn(dim, generator=generator, dtype=torch.float64)
    return torch.randn(count, dim, generator=generator, dtype=torch.float64) * scales + centre


def by_sklearn(features: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of a single sample
        return torch.from_numpy(np.atleast_2d(ledoit_wolf(features.double().numpy())[0]))


def fitted(features: torch.Tensor) -> torch.Tensor:
    """Our Ledoit–Wolf covariance of one class."""
    return average_moments([features])[1]


def near_identity(seed: int, dim: int) -> AffineMap:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(dim, dim + 1, generator=generator, dtype=torch.float64)
    return AffineMap(torch.eye(dim, dtype=torch.float64) + 0.3 * noise[:, :dim] / dim**0.5, 0.1 * noise[:, dim])


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("count", "dim"), [*itertools.product([2, 3, 5, 15, 16, 17, 64, 200], [1, 2, 3, 16, 64]), (30, 512)]
)
@pytest.mark.parametrize("power", [0.0, 1.0])
def test_ledoit_wolf_equals_scikit_learn(count: int, dim: int, power: float) -> None:
    features = made_up(count * 100 + dim, count, dim, power)
    assert torch.allclose(fitted(features), by_sklearn(features), rtol=0, atol=1e-12)
    summary = summarise(features)
    assert torch.allclose(summary.mean, features.mean(0), rtol=0, atol=1e-12)
    assert summary.rows.shape == (min(count, dim), dim) and 0 <= summary.shrinkage <= 1


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(2, 30),
    dim=st.integers(2, 20),
    constant=st.integers(0, 19),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
)
@example(seed=10960346, count=2, dim=14, constant=13, scale=0.001)  # agree in the one dimension left to 2e-7
def test_ledoit_wolf_with_constant_dimensions(seed: int, count: int, dim: int, constant: int, scale: float) -> None:
    features = made_up(seed, count, dim) * scale
    features[:, : min(constant, dim - 1)] = 0.5
    centre = features.mean(0)
    differ = (features - centre).square().sum() / count > SPREAD_FLOOR * centre.square().sum()
    want = by_sklearn(features) if differ else floor_level(centre) * torch.eye(dim, dtype=torch.float64)
    assert torch.allclose(fitted(features), want, rtol=0, atol=1e-12 * max(1.0, scale**2))


@pytest.mark.parametrize(
    "features",
    {
        "one picture": made_up(0, 1, 8),
        "identical pictures, n < d": made_up(0, 1, 8).expand(5, 8),
        "identical pictures, n > d": made_up(0, 1, 8).expand(20, 8),
        "all zero": torch.zeros(3, 8),
        "identical float32": made_up(0, 1, 8).float().expand(7, 8),
        "two pictures": made_up(0, 2, 8),
        "one number": made_up(0, 1, 1),
    }.values(),
)
def test_degenerate_classes_are_finite_and_samplable(features: torch.Tensor) -> None:
    cov, move = fitted(features), near_identity(1, features.shape[1])
    assert cov.isfinite().all() and cov.trace() > 0
    memory, merged = GaussianMemory(), GaussianMemory()
    memory.add([features])
    memory.transport(move)
    merged.add([features[:1]])
    merged.merge(0, features)
    for each in (memory, merged):
        draws = each.sample(torch.zeros(50, dtype=torch.int64))
        assert draws.isfinite().all() and draws.std(0).max() > 0
    assert torch.allclose(memory.moments(0)[0], move(features.double().mean(0)))
    mean, average = average_moments([features, features])
    assert torch.allclose(mean, features.double().mean(0)) and torch.allclose(average, cov, atol=1e-12)


@pytest.mark.parametrize("counts", [[5, 9, 30, 2], [16, 40, 17], [3]])
def test_average_moments_equals_a_loop_over_scikit_learn(counts: list[int]) -> None:
    groups = [made_up(i, count, 16) for i, count in enumerate(counts)]
    mean, cov = average_moments(groups)
    assert torch.allclose(mean, torch.stack([group.mean(0) for group in groups]).mean(0), rtol=0, atol=1e-12)
    assert torch.allclose(cov, torch.stack([by_sklearn(group) for group in groups]).mean(0), rtol=0, atol=1e-12)


def test_a_single_picture_takes_the_spread_of_its_neighbours() -> None:
    wide, single = made_up(1, 40, 6), made_up(2, 1, 6)
    beside, after = GaussianMemory(), GaussianMemory()
    beside.add([wide, single])
    after.add([wide])
    after.add([single])
    want = by_sklearn(wide).trace() / 6 * torch.eye(6, dtype=torch.float64)
    for memory in (beside, after):
        assert torch.allclose(memory.moments(1)[1], want, atol=1e-12)
    mean, cov = average_moments([wide, single])  # the average leaves its covariance out
    assert torch.allclose(mean, (wide.mean(0) + single[0]) / 2, atol=1e-12)
    assert torch.allclose(cov, by_sklearn(wide), atol=1e-12)


def test_a_chain_of_twenty_maps_equals_dense_transport() -> None:
    dim, memory = 24, GaussianMemory()
    want: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(20):
        groups = [made_up(10 * step + i, count, dim) for i, count in enumerate((1, 4, 30))]
        memory.add(groups)
        want += [memory.moments(len(want) + i) for i in range(3)]
        move = near_identity(step, dim)
        before = {name: getattr(memory, name) for name in ("rows", "origin_means", "noises", "shrinkages")}
        memory.transport(move)
        assert all(getattr(memory, name) is value for name, value in before.items())  # no class is touched
        want = [(move(mean), move.matrix @ cov @ move.matrix.T) for mean, cov in want]
    assert len(memory) == 60 and memory.matrices.shape == (20, dim, dim)
    for index, (mean, cov) in enumerate(want):
        got_mean, got_cov = memory.moments(index)
        assert relative(got_mean, mean) < 1e-10 and relative(got_cov, cov) < 1e-10
    assert relative(memory.means(), torch.stack([mean for mean, _ in want])) < 1e-10


def test_sampled_moments() -> None:
    dim, draws = 10, 20_000
    memory = GaussianMemory()
    memory.add([made_up(0, 4, dim), made_up(1, 40, dim)])
    memory.transport(near_identity(0, dim))
    memory.add([made_up(2, 7, dim)])
    memory.transport(near_identity(1, dim))
    memory.add([made_up(3, 1, dim), made_up(4, 12, dim)])
    torch.manual_seed(0)
    classes = torch.randperm(5 * draws) % 5
    samples = memory.sample(classes)
    for index in range(5):
        mean, cov = memory.moments(index)
        own = samples[classes == index].double()
        standard_error = (cov.diagonal() / draws).sqrt()
        assert ((own.mean(0) - mean).abs() < 5 * standard_error).all()
        # The variance of an entry of a sampled covariance is (σ_ij² + σ_ii σ_jj)/n.
        wide = ((cov.square() + torch.outer(cov.diagonal(), cov.diagonal())) / draws).sqrt()
        assert ((torch.cov(own.T) - cov).abs() < 5.5 * wide).all()


@pytest.mark.parametrize(("old", "new"), [(1, 1), (1, 5), (6, 4), (10, 30), (40, 3), (40, 1), (80, 90)])
def test_merge_equals_the_stacked_union(old: int, new: int) -> None:
    dim = 16
    first, more = made_up(0, old, dim), made_up(1, new, dim) + 0.3
    memory = GaussianMemory()
    memory.add([made_up(2, 9, dim), first, made_up(3, 8, dim)])
    move = near_identity(0, dim)
    memory.transport(move)
    others = [memory.moments(index) for index in (0, 2)]
    stacked = torch.cat([move(first), more])
    memory.merge(1, more)

    mean, cov = memory.moments(1)
    centred = stacked - stacked.mean(0)
    start = int(memory.ranks[0])
    rows = memory.rows[start : start + int(memory.ranks[1])]
    assert relative(rows.T @ rows, centred.T @ centred / len(stacked)) < 1e-10
    assert relative(mean, stacked.mean(0)) < 1e-10
    if old < dim:
        assert torch.allclose(cov, by_sklearn(stacked), rtol=0, atol=1e-10)
    else:  # the old fourth moments are a Gaussian's: the shrinkage is close, not exact
        assert relative(cov, by_sklearn(stacked)) < 0.02
    assert int(memory.counts[1]) == old + new and memory.task_of.tolist() == [0, 0, 0]
    for index, moments in zip((0, 2), others, strict=True):
        assert all(map(torch.equal, memory.moments(index), moments))

    second = near_identity(1, dim)
    before = [memory.moments(index) for index in range(3)]
    memory.transport(second)  # the merged class and the others now travel from different spaces
    for index, (mean, cov) in enumerate(before):
        assert relative(memory.moments(index)[0], second(mean)) < 1e-10
        assert relative(memory.moments(index)[1], second.matrix @ cov @ second.matrix.T) < 1e-10


def test_shrinkage_of_a_large_union_takes_the_old_class_for_a_gaussian() -> None:
    """With n ≥ d the old pictures are gone; their fourth moments about the new mean follow from S for a Gaussian."""
    first, more = made_up(0, 4000, 4, power=0.1), made_up(1, 4000, 4, power=0.1) + 1.0
    memory = GaussianMemory()
    memory.add([first])
    memory.merge(0, more)
    want = ledoit_wolf(torch.cat([first, more]).numpy())[1]
    assert float(memory.shrinkages[0]) == pytest.approx(want, rel=0.05)


@pytest.mark.parametrize("dim", [3, 5, 6, 7])
def test_a_sphere_is_not_shrunk_out_of_range(dim: int) -> None:
    """S = m I up to rounding, which can put δ on either side of zero."""
    axes = torch.cat([torch.eye(dim), -torch.eye(dim)]).double()
    for scale in torch.logspace(-1, 1, 60, dtype=torch.float64):
        features = axes * scale + 0.1
        assert 0 <= summarise(features).shrinkage <= 1
        assert torch.allclose(fitted(features), by_sklearn(features), rtol=0, atol=1e-12 * float(scale) ** 2 + 1e-14)

"""The Bures–Wasserstein map and distance against POT, and their properties."""

import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipcil.transport import bures_map, wasserstein2_to_samples


def covariance(generator: torch.Generator, dim: int, rank: int, scale: float = 1.0, ridge: float = 0.0) -> torch.Tensor:
    rows = torch.randn(rank, dim, generator=generator, dtype=torch.float64)
    return scale * (rows.T @ rows / rank + ridge * torch.eye(dim, dtype=torch.float64))


def pair(seed: int, dim: int, rank: int | None = None, ridge: float = 0.1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    rank = 2 * dim if rank is None else rank
    means = torch.randn(2, dim, generator=generator, dtype=torch.float64)
    first, second = (covariance(generator, dim, rank, scale, ridge) for scale in (1.5, 0.7))
    return means[0], first, means[1], second


def gaussian_and_samples(count: int, dim: int) -> tuple[torch.Tensor, ...]:
    """Mean and covariance of a Gaussian; mean, covariance and rows of some samples."""
    features = torch.randn(count, dim, generator=torch.Generator().manual_seed(count), dtype=torch.float64) + 1
    return *pair(count, dim)[:2], features.mean(0), torch.cov(features.T, correction=0).reshape(dim, dim), features


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("dim", [1, 2, 7, 40, 128])
def test_map_equals_pot(dim: int) -> None:
    mean_a, cov_a, mean_b, cov_b = pair(dim, dim)
    matrix, offset = bures_map(mean_a.float(), cov_a.float(), mean_b.float(), cov_b.float())
    assert matrix.dtype == offset.dtype == torch.float64
    matrix, offset = bures_map(mean_a, cov_a, mean_b, cov_b)
    want_matrix, want_offset = ot.gaussian.bures_wasserstein_mapping(
        mean_a.numpy(), mean_b.numpy(), cov_a.numpy(), cov_b.numpy()
    )
    assert relative(matrix, torch.from_numpy(want_matrix)) < 1e-10
    assert relative(offset, torch.from_numpy(want_offset).reshape(-1)) < 1e-10


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    dim=st.integers(1, 24),
    scales=st.tuples(st.floats(-4, 4), st.floats(-4, 4)),
    ridge=st.floats(-3, 0),
)
def test_map_is_positive_definite_and_reaches_the_target(
    seed: int, dim: int, scales: tuple[float, float], ridge: float
) -> None:
    mean_a, cov_a, mean_b, cov_b = pair(seed, dim, ridge=10**ridge)
    cov_a, cov_b = cov_a * 10 ** scales[0], cov_b * 10 ** scales[1]
    matrix, offset = bures_map(mean_a, cov_a, mean_b, cov_b)
    assert torch.equal(matrix, matrix.T)
    assert torch.linalg.eigvalsh(matrix)[0] > 0
    assert relative(matrix @ cov_a @ matrix, cov_b) < 1e-9
    assert torch.allclose(matrix @ mean_a + offset, mean_b, rtol=1e-9, atol=1e-9)
    same = bures_map(mean_a, cov_a, mean_a, cov_a)
    assert torch.allclose(same.matrix, torch.eye(dim, dtype=torch.float64), atol=1e-8)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), dim=st.integers(2, 24), rank=st.integers(0, 5))
def test_singular_covariances_stay_finite(seed: int, dim: int, rank: int) -> None:
    rank = min(rank, dim - 1)
    mean_a, cov_a, mean_b, cov_b = pair(seed, dim, max(rank, 1), ridge=0.0)
    if rank == 0:
        cov_a = torch.zeros_like(cov_a)
    for first, second in ((cov_a, cov_b), (cov_b, cov_a), (cov_a, torch.eye(dim).double()), (cov_a, cov_a)):
        matrix, offset = bures_map(mean_a, first, mean_b, second)
        assert matrix.isfinite().all()
        assert offset.isfinite().all()
        assert torch.equal(matrix, matrix.T)
        distance = wasserstein2_to_samples(mean_a, first, second)
        assert distance.isfinite()
        assert distance >= 0
    # `first` was equal to `second` in the last turn: near the identity even where the covariance says nothing.
    assert torch.allclose(matrix, torch.eye(dim, dtype=torch.float64), atol=0.1)


def dense_distance(mean_a: torch.Tensor, cov_a: torch.Tensor, mean_b: torch.Tensor, cov_b: torch.Tensor) -> float:
    """W₂², Eq. (3), with the square roots written out."""
    values, basis = torch.linalg.eigh(cov_a)
    root = basis * values.clamp(min=0).sqrt() @ basis.T
    overlap = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    return float((mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * overlap)


@pytest.mark.parametrize(("count", "dim"), [(5, 1), (7, 2), (17, 7), (83, 40), (259, 128), (60, 12)])
def test_distance_equals_pot(count: int, dim: int) -> None:
    mean, cov, own_mean, own_cov, features = gaussian_and_samples(count, dim)
    want = ot.gaussian.bures_wasserstein_distance(mean.numpy(), own_mean.numpy(), cov.numpy(), own_cov.numpy())
    assert float(wasserstein2_to_samples(mean, cov, features)) == pytest.approx(float(want) ** 2, rel=1e-6)
    assert float(wasserstein2_to_samples(own_mean, own_cov, features)) == pytest.approx(0, abs=1e-11)


@pytest.mark.parametrize(("count", "dim"), [(1, 6), (2, 6), (5, 40)])
def test_distance_to_few_samples_equals_dense(count: int, dim: int) -> None:
    """Where POT cannot take the root of a singular covariance."""
    mean, cov, own_mean, own_cov, features = gaussian_and_samples(count, dim)
    dense = dense_distance(mean, cov, own_mean, own_cov)
    assert float(wasserstein2_to_samples(mean, cov, features)) == pytest.approx(dense, rel=1e-6)

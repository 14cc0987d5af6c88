"""Folding old spaces: the same Gaussians with fewer matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from clipcil.memory.gaussians import AffineMap, GaussianMemory

DIM = 6


def filled(maps: list[Tensor]) -> GaussianMemory:
    """Two classes in each of `len(maps) + 1` spaces."""
    generator = torch.Generator().manual_seed(0)
    memory = GaussianMemory()
    for matrix in [*maps, None]:
        memory.add([torch.randn(4, DIM, generator=generator, dtype=torch.float64) + 3 for _ in range(2)])
        if matrix is not None:
            memory.transport(AffineMap(matrix, torch.randn(DIM, generator=generator, dtype=torch.float64)))
    return memory


def rotations(count: int, scale: float = 1.1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(DIM, DIM, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [scale * torch.linalg.qr(matrix).Q for matrix in drawn]


def test_scaled_rotations_are_folded_exactly() -> None:
    memory, folded = filled(rotations(5)), filled(rotations(5))
    folded.fold(2)
    assert len(memory.matrices) == 5 and len(folded.matrices) == 2
    for index in range(len(memory)):
        for one, other in zip(memory.moments(index), folded.moments(index), strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)
    maps = AffineMap(rotations(1)[0], torch.ones(DIM, dtype=torch.float64))
    memory.transport(maps)
    folded.transport(maps)  # later moves act on what was folded, too
    torch.testing.assert_close(memory.means(), folded.means(), atol=1e-10, rtol=1e-10)
    assert int(folded.space_of.max()) == len(folded.matrices) - 1


def test_other_maps_are_exact_but_for_the_isotropic_part() -> None:
    generator = torch.Generator().manual_seed(2)
    maps = [torch.eye(DIM) + 0.1 * torch.randn(DIM, DIM, generator=generator) for _ in range(3)]
    memory, folded = (filled([matrix.double() for matrix in maps]) for _ in range(2))
    folded.fold(0)
    assert not len(folded.matrices)
    torch.testing.assert_close(memory.means(), folded.means(), atol=1e-10, rtol=1e-10)
    for index in range(len(memory)):
        dense, other = memory.moments(index)[1], folded.moments(index)[1]
        first = 6 if index >= 6 else 0  # the newest two classes never left their space
        allowed = float(memory.noises[index]) * 4 * DIM if not first else 1e-10
        assert float((dense - other).norm()) <= max(allowed, 1e-10)
        torch.testing.assert_close(dense.trace(), other.trace(), atol=1e-10, rtol=1e-10)


def test_nothing_to_fold() -> None:
    memory = filled(rotations(2))
    before = {name: value.clone() for name, value in memory.state_dict().items()}
    memory.fold(2)
    assert all(torch.equal(value, before[name]) for name, value in memory.state_dict().items())

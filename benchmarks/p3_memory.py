"""P3: a stored memory follows the tower and is drawn from.

Peers: a dense covariance per class, Σ ← T Σ Tᵀ, and a Cholesky factor before anything can be drawn; batched over all
classes, in place of the loop over classes that the reference codes have. Ours: one product per task of origin, and
draws that are carried instead of covariances. Both in float64 throughout; each draws once from every class.
"""

import torch
from torch import Tensor

from benchmarks.harness import Row, alternate, bytes_of, difference, versus
from clipcil.memory.gaussians import AffineMap, GaussianMemory
from clipcil.memory.ledoit_wolf import average_moments


class DenseMemory:
    """Means (C, d) and covariances (C, d, d)."""

    def __init__(self, dim: int) -> None:
        self.means = torch.zeros(0, dim, dtype=torch.float64)
        self.covariances = torch.zeros(0, dim, dim, dtype=torch.float64)

    def add(self, groups: list[Tensor]) -> None:
        means, covariances = zip(*(average_moments([group]) for group in groups), strict=True)
        self.means = torch.cat([self.means, torch.stack(means)])
        self.covariances = torch.cat([self.covariances, torch.stack(covariances)])

    def transport(self, map: AffineMap) -> None:
        self.means = self.means @ map.matrix.T + map.offset
        self.covariances = map.matrix @ self.covariances @ map.matrix.T

    def sample(self, classes: Tensor) -> Tensor:
        factors = torch.linalg.cholesky(self.covariances).float()
        noise = torch.randn(len(classes), self.means.shape[1], 1)
        drawn: Tensor = self.means[classes].float() + (factors[classes] @ noise).squeeze(2)
        return drawn


def near_identity(dim: int) -> AffineMap:
    """What a tower that moved a little gives: symmetric positive definite, close to I."""
    noise = torch.randn(dim, dim, dtype=torch.float64) / dim**0.5
    return AffineMap(torch.eye(dim, dtype=torch.float64) + 0.02 * (noise + noise.T), 0.01 * noise[0])


def both(tasks: int, classes: int, dim: int, count: int) -> tuple[DenseMemory, GaussianMemory]:
    """The same history on both sides: `tasks` tasks, the tower moving before each but the first."""
    torch.manual_seed(0)
    dense, ours = DenseMemory(dim), GaussianMemory()
    for task in range(tasks):
        map = near_identity(dim) if task else None
        groups = [torch.randn(count, dim).double() * torch.rand(dim) for _ in range(classes // tasks)]
        for side in (dense, ours):
            if map is not None:
                side.transport(map)
            side.add(groups)
    return dense, ours


def moment_error(dense: DenseMemory, ours: GaussianMemory) -> float:
    """The largest difference in any class's mean or covariance."""
    worst = 0.0
    for index in range(len(ours)):
        mean, covariance = ours.moments(index)
        worst = max(worst, difference(mean, dense.means[index]), difference(covariance, dense.covariances[index]))
    return worst


def run(quick: bool) -> list[Row]:
    tasks, classes, dim, count = (4, 16, 64, 20) if quick else (10, 200, 512, 30)
    dense, ours = both(tasks, classes, dim, count)
    map, everyone = near_identity(dim), torch.arange(classes)
    dense.transport(map)
    ours.transport(map)
    error = moment_error(dense, ours)
    kept = dense.means.clone(), dense.covariances.clone()
    state = {name: value.clone() for name, value in ours.state_dict().items()}

    def theirs() -> None:
        dense.means, dense.covariances = kept
        dense.transport(map)
        dense.sample(everyone)

    def mine() -> None:
        ours.transport(map)
        ours.sample(everyone)

    seconds = alternate({"theirs": theirs, "ours": mine}, repeats=3)
    ours.load_state_dict(state)
    theirs_bytes, ours_bytes = bytes_of(kept), bytes_of(state.values())
    what, ratio = f"{classes} classes, {tasks} tasks, d={dim}, n={count}", theirs_bytes / ours_bytes
    sizes = f"{theirs_bytes / 1e6:.0f} MB", f"{ours_bytes / 1e6:.0f} MB", f"{ratio:.1f}×"
    details = {"bytes": {"theirs": theirs_bytes, "ours": ours_bytes}}
    size = Row("P3", f"bytes of the memory, {what}", *sizes, "≥9×", ratio >= 9, details=details)
    return [versus("P3", f"carry and draw, {what}", seconds, 20.0, error=error, tolerance=1e-10), size]

"""S1: Ledoit–Wolf statistics of 200 classes against a loop over scikit-learn's function."""

from __future__ import annotations

import torch

from benchmarks.harness import Row, alternate, difference, versus
from clipcil.memory.gaussians import GaussianMemory


def run(quick: bool) -> list[Row]:
    try:
        from sklearn.covariance import ledoit_wolf
    except ImportError:
        return [Row("S1", "Ledoit–Wolf", "scikit-learn is not installed", "", "skipped")]
    classes, count, dim = (10, 12, 32) if quick else (200, 30, 512)
    torch.manual_seed(0)
    groups = [torch.randn(count, dim, dtype=torch.float64) * torch.rand(dim) for _ in range(classes)]

    def ours() -> GaussianMemory:
        memory = GaussianMemory(dim)
        memory.add(groups)
        return memory

    def theirs() -> list[torch.Tensor]:
        return [torch.from_numpy(ledoit_wolf(group.numpy())[0]) for group in groups]

    error = max(difference(ours().moments(index)[1], cov) for index, cov in enumerate(theirs()))
    seconds = alternate({"theirs": theirs, "ours": ours}, 3)
    step = f"Ledoit–Wolf of {classes} classes, n={count}, d={dim}, against scikit-learn"
    return [versus("S1", step, seconds, error=error, tolerance=1e-10)]

"""S2: choosing exemplars. Peers: at every step the mean with each row left is formed and compared, rows chosen are cut
out. Ours: one running product per step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.harness import Row, alternate, versus
from clipcil.memory.exemplars import herd


def greedy(features: Tensor, count: int) -> Tensor:
    """The plain loop: p_k = argmin ‖μ − (x + Σ p_j)/k‖ over the rows left."""
    unit = normalize(features.double(), dim=1)
    mean, left, total = unit.mean(0), torch.arange(len(unit)), torch.zeros(unit.shape[1], dtype=torch.float64)
    chosen = []
    for k in range(1, count + 1):
        distances = (mean - (total + unit) / k).norm(dim=1)
        best = int(distances.argmin())
        chosen.append(left[best])
        total = total + unit[best]
        keep = torch.arange(len(unit)) != best
        unit, left = unit[keep], left[keep]
    return torch.stack(chosen)


def run(quick: bool) -> list[Row]:
    count, dim, keep = (50, 32, 10) if quick else (500, 512, 200)
    torch.manual_seed(0)
    features = torch.randn(count, dim)
    wrong = int((herd(features, keep) != greedy(features, keep)).sum())
    seconds = alternate({"theirs": lambda: greedy(features, keep), "ours": lambda: herd(features, keep)}, 3)
    step = f"herding {keep} of {count} pictures, d={dim}"
    return [versus("S2", step, seconds, error=float(wrong), tolerance=0.0)]

"""What both trainings share: AdamW, a learning rate that follows the clock, weights averaged over steps."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn


def optimiser(module: nn.Module, rate: float, decay: float = 0.02) -> torch.optim.AdamW:
    """AdamW; matrices are decayed, biases, norms and embeddings are not."""
    named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
    matrices = [weight for name, weight in named if weight.dim() > 1 and "embedding" not in name]
    others = [weight for name, weight in named if not (weight.dim() > 1 and "embedding" not in name)]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))


def warm_cosine(optimise: torch.optim.Optimizer, rate: float, step: int, steps: int) -> None:
    """Up over the first 100 steps (or the first third), then down a cosine to nothing at the last."""
    warm = min(100, 1 + steps // 3)
    now = rate * min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))
    for group in optimise.param_groups:
        group["lr"] = now


class Average:
    """An exponential average of a module's weights."""

    def __init__(self, module: nn.Module, keep: float) -> None:
        self._module, self._keep, self._steps = module, keep, 0
        self.weights = {name: weight.detach().clone() for name, weight in module.state_dict().items()}

    @torch.no_grad()
    def step(self) -> None:
        self._steps += 1
        keep = min(self._keep, self._steps / (self._steps + 9))
        for name, weight in self._module.state_dict().items():
            self.weights[name].lerp_(weight, 1 - keep)

    def apply(self) -> None:
        self._module.load_state_dict(self.weights)

    def save(self, file: Path) -> None:
        half = file.with_suffix(".part")
        save_file({name: weight.contiguous() for name, weight in self.weights.items()}, half)
        half.rename(file)

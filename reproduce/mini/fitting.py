"""The training loop of both towers: AdamW, a learning rate that follows the step, weights averaged over steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


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


def total(found: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """The weighted sum of named losses."""
    return torch.stack([weights[name] * value for name, value in found.items()]).sum()


def fit(
    title: str,
    module: nn.Module,
    rate: float,
    keep: float,
    steps: int,
    save: Path,
    losses: Callable[[], dict[str, Tensor]],
    weights: Mapping[str, float],
    measure: Callable[[], str] = lambda: "",
    say: Callable[[str], None] = print,
) -> None:
    """Train the weights of a module that require gradients; every 50 steps and at the end the averaged ones are saved.

    Args:
        title: What is trained, for the lines that are printed.
        module: In the end it has the averaged weights.
        rate: The highest learning rate.
        keep: How much of the average a step keeps.
        steps: Number of steps.
        save: File of the averaged weights.
        losses: Draws a batch and returns its losses by name.
        weights: What each loss counts.
        measure: What else to print.
        say: Prints a line.
    """
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    optimise, average = optimiser(module, rate), Average(module, keep)
    for step in range(steps):
        warm_cosine(optimise, rate, step, steps)
        found = losses()
        optimise.zero_grad()
        total(found, weights).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimise.step()
        average.step()
        if step % 50 == 49:
            average.save(save)
            parts = ", ".join(f"{name} {float(value.detach()):.3f}" for name, value in found.items())
            say(f"{title}: step {step + 1} of {steps}, {parts}; {measure()}")
    average.apply()
    average.save(save)


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

"""The training loop of both towers: AdamW, a learning rate that follows the step, weights averaged over steps."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def total(found: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """The weighted sum of named losses."""
    return torch.stack([weights[name] * value for name, value in found.items()]).sum()


def fit(
    module: nn.Module,
    rate: float,
    keep: float,
    steps: int,
    save: Path,
    losses: Callable[[], dict[str, Tensor]],
    weights: Mapping[str, float],
) -> None:
    """Train the weights of a module that require gradients; in the end it has the averaged weights, saved to `save`.

    AdamW with a weight decay of 0.02 for matrices, and none for biases, norms and embeddings.

    `rate` is the highest learning rate: up over the first 100 steps (or the first third), then down a cosine to nothing
    at the last. `keep` is the share of the average that a step keeps. `losses` draws a batch and returns its losses by
    name, which count as `weights` say.
    """
    trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    matrices = [weight for name, weight in trained.items() if weight.dim() > 1 and "embedding" not in name]
    others = [weight for name, weight in trained.items() if weight.dim() < 2 or "embedding" in name]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
    optimise, warm = torch.optim.AdamW(groups, betas=(0.9, 0.98)), min(100, 1 + steps // 3)
    average = {name: weight.detach().clone() for name, weight in module.state_dict().items()}
    for step in range(steps):
        for group in optimise.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))
        found = losses()
        optimise.zero_grad()
        total(found, weights).backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimise.step()
        kept = min(keep, (step + 1) / (step + 10))
        with torch.no_grad():
            for name, weight in module.state_dict().items():
                average[name].lerp_(weight, 1 - kept)
        if step % 50 == 49:
            parts = ", ".join(f"{name} {float(value.detach()):.3f}" for name, value in found.items())
            print(f"{save.stem}: step {step + 1} of {steps}, {parts}")
    module.load_state_dict(average)
    save_file({name: weight.contiguous() for name, weight in average.items()}, save)

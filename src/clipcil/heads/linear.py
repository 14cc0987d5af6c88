"""A linear classifier whose rows are trained task by task (L2P, DualPrompt and CODA-Prompt)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class GrowingHead(nn.Module):
    """A linear classifier over all classes seen; each task adds its rows, and those of earlier tasks are frozen.

    The cross-entropy of these methods is over the classes of the current task only (logits of all others at −∞), so
    earlier rows would get no gradient anyway; as separate parameters they cannot change at all.
    The rows are initialised to 0, as in the code of L2P and DualPrompt; CODA-Prompt's code keeps PyTorch's random
    values. A masked cross-entropy does not depend on what the rows of a task have in common, so a common part of their
    initial values would stay and favour one task over another: hence 0 for all three methods.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self.size, self.device = size, device
        self.weights = nn.ParameterList()  # a task each: (C_k, size)
        self.biases = nn.ParameterList()  # a task each: (C_k,)

    def grow(self, classes: int) -> None:
        zeros = torch.zeros(classes, self.size + 1, device=self.device)
        self.weights.append(nn.Parameter(zeros[:, 1:].clone(), requires_grad=False))
        self.biases.append(nn.Parameter(zeros[:, 0].clone(), requires_grad=False))

    def newest(self) -> list[nn.Parameter]:
        """The parameters of the newest task."""
        return [self.weights[-1], self.biases[-1]]

    def current(self, features: Tensor) -> Tensor:
        """(B, size) → (B, C_k): the classes of the newest task."""
        return linear(features, self.weights[-1], self.biases[-1])

    def forward(self, features: Tensor) -> Tensor:
        """(B, size) → (B, classes seen)."""
        return linear(features, torch.cat(list(self.weights)), torch.cat(list(self.biases)))

    def notes(self) -> list[str]:
        """A remark for reports where tasks have one class."""
        lone = sum(len(rows) == 1 for rows in self.weights)
        said = "a cross-entropy within the task learns nothing of a single class, whose logit is always 0"
        return [f"{lone} of {len(self.weights)} tasks have one class: {said}"] if lone else []

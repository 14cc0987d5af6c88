"""A linear classifier whose rows are trained task by task (L2P, DualPrompt and CODA-Prompt)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class GrowingHead(nn.Module):
    """A linear classifier over all classes seen; each task adds its rows, and the rows of earlier tasks are frozen.

    The cross-entropy of these methods is over the classes of the current task only, so earlier rows would get no
    gradient. Rows start at 0, as in the code of L2P and DualPrompt. CODA-Prompt's code starts from random values; a
    loss within the task never changes their common part, which would favour one task over another.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self.size, self.device = size, device
        self.weights = nn.ParameterList()  # a task each: (C_k, size)
        self.biases = nn.ParameterList()  # a task each: (C_k,)

    def grow(self, classes: int) -> None:
        """Add the rows of a task."""
        for parameters, shape in ((self.weights, (classes, self.size)), (self.biases, (classes,))):
            parameters.append(nn.Parameter(torch.zeros(shape, device=self.device), requires_grad=False))

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

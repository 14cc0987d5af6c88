"""Sampling from many low-rank Gaussians at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

MANY = 8
"""From this many draws per class on, one matrix product per class is faster than one weighted gather for all draws."""


class Sampler(NamedTuple):
    """The class Gaussians prepared for sampling: shrunk, in float32; indices on the host."""

    rows: Tensor  # (R, d): √(1−ρ) B of all classes, one class after another
    starts: Tensor  # (C + 1,): class c owns rows starts[c] : starts[c + 1]
    deviations: Tensor  # (C, 1): √s
    means: Tensor  # (C, d): transported, Mμ + c
    matrices: Tensor  # (P, d, d): M of the older spaces
    spaces: Tensor  # (C,): row of `matrices`, or P where M = I
    rank: Tensor  # (C,): the place of each class when sorted by space

    @torch.no_grad()
    def draw(self, classes: Tensor) -> Tensor:
        """One draw for each entry of `classes` (N,), in any order: (N, d), from torch's global generator.

            z = (Mμ + c) + M (√(1−ρ) Bᵀε₁ + √s ε₂),    ε₁ ~ N(0, I_r), ε₂ ~ N(0, I_d)

        Draws are sorted by space and class, so that an older space is one product with its M. Rows are not copied or
        padded, however different their numbers. Only the deviation from the mean passes M in float32; the mean was
        transported in float64.
        """
        device, dtype, dim = self.rows.device, self.rows.dtype, self.rows.shape[1]
        classes = classes.to("cpu", torch.int64)
        if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < len(self.means):
            raise IndexError(f"asked for classes {int(classes.min())}…{int(classes.max())} of {len(self.means)}")
        order = self.rank[classes].argsort(stable=True)
        classes = classes[order]
        on_device = classes.to(device, non_blocking=True)
        draws = torch.randn(len(classes), dim, dtype=dtype, device=device) * self.deviations[on_device]
        with torch.autocast(device.type, enabled=False):  # statistics keep their precision in mixed-precision training
            self._mix_rows(classes, draws)
            spaces, lengths = torch.unique_consecutive(self.spaces[classes], return_counts=True)
            for space, part in zip(spaces.tolist(), torch.split(draws, lengths.tolist())):
                if space < len(self.matrices):
                    part.copy_(part @ self.matrices[space].T)
        draws += self.means[on_device]
        result = torch.empty_like(draws)
        result[order.to(device, non_blocking=True)] = draws
        return result

    def _mix_rows(self, classes: Tensor, draws: Tensor) -> None:
        """Add √(1−ρ) Bᵀε₁ to each of `draws`; `classes` (N,) are on the host and sorted."""
        widths = self.starts.diff()[classes]  # (N,): the rank of each draw's class
        ends = widths.cumsum(0)
        weights = torch.randn(int(widths.sum()), dtype=draws.dtype, device=draws.device)  # every ε₁, one after another
        present, repeats = torch.unique_consecutive(classes, return_counts=True)
        if len(classes) < MANY * len(present):
            first = self.starts[classes] - ends + widths
            members = first.repeat_interleave(widths) + torch.arange(len(weights))  # row of B for each weight
            bags = (members.to(draws.device), self.rows, (ends - widths).to(draws.device))
            draws += functional.embedding_bag(*bags, mode="sum", per_sample_weights=weights)
            return
        starts = self.starts.tolist()
        used = (repeats * self.starts.diff()[present]).tolist()
        parts = torch.split(draws, repeats.tolist()), torch.split(weights, used)
        for c, own_draws, own_weights in zip(present.tolist(), *parts):
            own_draws.addmm_(own_weights.view(len(own_draws), -1), self.rows[starts[c] : starts[c + 1]])

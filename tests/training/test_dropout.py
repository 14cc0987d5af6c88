"""Dropout by 16 random bits for each number."""

from __future__ import annotations

import torch

from clipcil.training.cpu import quick_dropout


def test_quick_dropout_drops_its_share_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    hidden = torch.ones(701, 999)
    dropped = quick_dropout(hidden, 0.1)
    kept = dropped != 0
    assert abs(float(kept.double().mean()) - 0.9) < 5 * (0.09 / hidden.numel()) ** 0.5
    torch.testing.assert_close(dropped[kept], torch.full((int(kept.sum()),), 1 / (1 - 6554 / 65536)))
    neighbours = (kept[:, 1:] & kept[:, :-1]).double().mean()  # four numbers share a random word, and are independent
    assert abs(float(neighbours) - 0.81) < 0.003
    assert torch.equal(quick_dropout(hidden, 0.0), hidden)
    assert torch.equal(quick_dropout(hidden.bfloat16(), 0.5).float().unique(), torch.tensor([0.0, 2.0]))

"""Rounding numbers that are almost 0 to 0 while training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Round float32 results below 1.2e-38 to 0 inside, in this thread.

    A softmax over many classes gives most of them gradients of any size down to 0. A processor takes a hundred times as
    long for numbers below the smallest normal one, and a matrix product with a few of them takes several times as long.
    Beside the other terms of a sum they are far below rounding. Threads that PyTorch started before keep their
    setting. Nothing is done on processors that cannot do this.
    """
    before = flushes_denormals()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def flushes_denormals() -> bool:
    """Whether this thread rounds such results to 0 now."""
    return float(torch.tensor(torch.finfo(torch.float32).tiny) / 2) == 0

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
    Beside the other terms of a sum they are far below rounding. Nothing is done on processors that cannot do this.
    """
    before = flushes_denormals()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def start_flushing_threads() -> None:
    """Start PyTorch's other threads, where there are none yet, so that they always round such results to 0.

    A thread takes the setting of the one that starts it, and keeps it: `flushed_denormals` cannot reach it later.
    """
    with flushed_denormals():
        torch.ones(2**20).mul_(1)  # large enough to be divided among all threads


def flushes_denormals() -> bool:
    """Whether this thread rounds such results to 0 now."""
    return float(torch.tensor(torch.finfo(torch.float32).tiny, dtype=torch.float32) / 2) == 0

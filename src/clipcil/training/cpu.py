"""Settings and functions that make training fast on a CPU; they change results within rounding only."""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h
SETTINGS_OF_GLIBC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")
DROPOUT_STEPS = 2**16
"""Dropout draws 16 random bits for each number. PyTorch draws 64, which takes as long as a matrix product."""


def prepare_process() -> None:
    """Set up this process for training; called once where a command or a worker begins."""
    keep_freed_memory()
    with flushed_denormals():  # each of PyTorch's threads keeps the setting of the one that starts it
        torch.ones(2**20).mul_(1)  # large enough to start all of them


def keep_freed_memory() -> bool:
    """Let this process keep up to 2 GiB of freed memory; False where it is not possible, or the environment sets this.

    By default glibc takes every tensor above 32 MiB from the kernel and returns it when it is freed, so each training
    step begins with memory that the kernel has to fill with zeros, page by page.
    """
    if any(name in os.environ for name in SETTINGS_OF_GLIBC):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    large = mallopt(M_MMAP_THRESHOLD, 2**30) or mallopt(M_MMAP_THRESHOLD, 2**25)  # the most that older versions accept
    return bool(large and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def share_freed_memory() -> None:
    """Let all threads take memory from two pools, where the C library is glibc, which gives each of many a pool."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)


def return_freed_memory() -> None:
    """Give freed memory back to the system, where the C library is glibc, which keeps what each thread freed.

    Without this a server that is asked during its lessons holds a third more memory after ten of them.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Round float32 results below 1.2e-38 to 0 inside, in this thread, where the processor can.

    A softmax over many classes gives most of them gradients of any size down to 0. Numbers below the smallest normal
    one take a processor a hundred times as long; in a sum with other terms they are far below rounding.
    """
    before = flushes_denormals()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def flushes_denormals() -> bool:
    """Whether this thread flushes denormals now."""
    return float(torch.tensor(torch.finfo(torch.float32).tiny, dtype=torch.float32) / 2) == 0


def quick_dropout(hidden: Tensor, share: float) -> Tensor:
    """`hidden` with numbers set to 0 with probability `share`, the others divided by the average share kept."""
    mask = draw_kept(hidden.shape, share, hidden.device).to(hidden.dtype)
    return hidden * mask.mul_(1 / keep_share(share))


def draw_kept(shape: Sequence[int], share: float, device: torch.device) -> Tensor:
    """A mask of this shape, False for about `share` of its entries, each drawn independently of the others."""
    count = int(torch.Size(shape).numel())
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=device).random_(-(2**63), None)
    return words.view(torch.int16)[:count].view(tuple(shape)) >= round(share * DROPOUT_STEPS) - DROPOUT_STEPS // 2


def keep_share(share: float) -> float:
    """The share that `draw_kept` keeps on average: `share` is rounded to a multiple of 2⁻¹⁶."""
    return 1 - round(share * DROPOUT_STEPS) / DROPOUT_STEPS

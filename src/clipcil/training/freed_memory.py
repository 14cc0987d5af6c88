"""Keeping freed memory for the tensors of the next training step."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGEST_KEPT, MOST_KEPT = 2**30, 2**31 - 1
LARGEST_OLD = 2**25
"""What older versions of glibc accept as the largest threshold."""
SETTINGS_OF_GLIBC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let this process keep freed memory, up to 2 GiB of it at the end of the heap; whether that was possible.

    By default glibc takes every tensor above 32 MiB from the kernel and gives it back when it is freed, so that each
    training step begins with memory the kernel has to fill with zeros, page by page. Results do not change. Nothing is
    done where there is no glibc, or where the environment sets these values.
    """
    if any(name in os.environ for name in SETTINGS_OF_GLIBC):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    large = mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT) or mallopt(M_MMAP_THRESHOLD, LARGEST_OLD)
    return bool(large and mallopt(M_TRIM_THRESHOLD, MOST_KEPT))

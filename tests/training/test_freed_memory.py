"""Freed memory is kept for the next tensor, unless the environment says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from clipcil.training.cpu import SETTINGS_OF_GLIBC, keep_freed_memory

PROGRAM = """
import resource, sys, torch
from clipcil.training.cpu import keep_freed_memory

done = keep_freed_memory() if sys.argv[1] == "keep" else None
for step in range(40):
    if step == 20:  # small things may lie in the first holes that large tensors leave; then they fit
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
print(done, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(side: str) -> tuple[str, int]:
    """What `keep_freed_memory` returned in a process of its own, and the page faults of the last 20 of 40
    tensors of 64 MiB there."""
    clean = {key: value for key, value in os.environ.items() if key not in SETTINGS_OF_GLIBC}
    command = [sys.executable, "-c", PROGRAM, side]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120, check=True)
    answer, count = done.stdout.split()
    return answer, int(count)


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library than glibc")
def test_large_tensors_are_taken_from_the_kernel_once() -> None:
    _, usual = faults("default")
    assert usual >= 20 * 32  # pages of 2 MiB at most: every tensor is new memory
    answer, kept = faults("keep")
    assert answer == "True"
    assert kept * 5 < usual


@pytest.mark.parametrize("name", SETTINGS_OF_GLIBC)
def test_what_the_environment_sets_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1000000")
    assert not keep_freed_memory()

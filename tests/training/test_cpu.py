"""What makes training fast on a CPU changes no more than it says: freed memory, denormals, dropout."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from clipcil.training.cpu import (
    SETTINGS_OF_GLIBC,
    flushed_denormals,
    flushes_denormals,
    keep_freed_memory,
    quick_dropout,
)
from clipcil.training.trainer import Trainer, Training

FAULTS = """
import resource, torch
from clipcil.training import cpu

done = cpu.keep_freed_memory() if {keep} else None
for step in range(40):
    if step == 20:  # small things may lie in the first holes that large tensors leave; then they fit
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
print(done, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Prints the page faults of the last 20 of 40 tensors of 64 MiB."""
THREADS = """
import torch
from clipcil.training.cpu import flushed_denormals, prepare_process

torch.set_num_threads(2)
prepare_process()
small = torch.full((2**20,), torch.finfo(torch.float32).tiny)
with flushed_denormals():
    print(int((small / 2 == 0).sum()))
"""
"""Prints how many of 2²⁰ numbers are rounded to 0, of which two threads compute one half each."""

HELD = """
from pathlib import Path
from clipcil.training.cpu import return_freed_memory

def held():
    return int(Path("/proc/self/statm").read_text().split()[1])

parts = [b"%d" % number * 2**14 for number in range(1000)]
last, before = parts.pop(), held()
del parts
print(before - held())
return_freed_memory()
print(before - held())
"""
"""Prints how many pages are given back when those below a part that stays are freed, and when they are returned."""


def printed(program: str) -> list[str]:
    """The words that a program prints in a process of its own, with the defaults of glibc."""
    clean = {key: value for key, value in os.environ.items() if key not in SETTINGS_OF_GLIBC}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120, check=True).stdout.split()


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library than glibc")
def test_large_tensors_are_taken_from_the_kernel_once() -> None:
    _, usual = printed(FAULTS.format(keep=False))
    assert int(usual) >= 20 * 32  # pages of 2 MiB at most: every tensor is new memory
    done, kept = printed(FAULTS.format(keep=True))
    assert done == "True" and int(kept) * 5 < int(usual)


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library than glibc")
def test_freed_memory_is_returned() -> None:
    freed, returned = printed(HELD)
    assert int(freed) < 1000 < 8000 < int(returned)


@pytest.mark.parametrize("name", SETTINGS_OF_GLIBC)
def test_what_the_environment_sets_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1000000")
    assert not keep_freed_memory()


@pytest.fixture
def denormals() -> Iterator[None]:
    """A processor that can flush denormals; a test begins and ends with the default, not to do so."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot round such numbers to 0")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("denormals")
def test_denormals_are_flushed_inside_and_the_setting_comes_back_after_an_error() -> None:
    small = torch.full((3,), torch.finfo(torch.float32).tiny)
    with pytest.raises(ValueError), flushed_denormals():
        assert flushes_denormals() and not (small / 2).any()
        raise ValueError
    assert not flushes_denormals() and (small / 2).all()
    torch.set_flush_denormal(True)
    with flushed_denormals():
        pass
    torch.set_default_dtype(torch.float64)  # the setting is found whatever the default precision is
    try:
        assert flushes_denormals()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("denormals")
def test_forward_and_backward_passes_of_training_flush_and_what_follows_does_not() -> None:
    weight, seen = nn.Parameter(torch.ones(4)), list[bool]()
    weight.register_hook(lambda gradient: seen.append(flushes_denormals()))

    def loss(rows: Tensor) -> Tensor:
        seen.append(flushes_denormals())
        return weight[rows].square().sum()

    Trainer().fit("train", [weight], 4, loss, Training(epochs=1, batch_size=2))
    assert seen == [True] * 4 and not flushes_denormals()  # two steps, forward and backward
    assert printed(THREADS) == [str(2**20)]  # half of it without prepare_process


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

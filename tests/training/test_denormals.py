"""Numbers that are almost 0 are rounded to 0 while training, and nowhere else."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from clipcil.training.cpu import flushed_denormals, flushes_denormals
from clipcil.training.trainer import Trainer, Training

TINY = torch.finfo(torch.float32).tiny

needs_support = pytest.mark.skipif(
    not torch.set_flush_denormal(False), reason="this processor cannot round such numbers to 0"
)


PROGRAM = """
import torch
from clipcil.training.cpu import flushed_denormals, start_flushing_threads

torch.set_num_threads(2)
start_flushing_threads()
small = torch.full((2**20,), torch.finfo(torch.float32).tiny)
with flushed_denormals():
    print(int((small / 2 == 0).sum()))
"""
"""Prints how many of 2²⁰ numbers are rounded to 0, of which two threads compute one half each."""


@pytest.fixture(autouse=True)
def as_it_was():
    """Every test begins and ends with the default."""
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)


@needs_support
def test_they_are_flushed_inside_and_kept_outside():
    small = torch.full((3,), TINY)
    with flushed_denormals():
        assert (small / 2).tolist() == [0, 0, 0]
    assert all(0 < value < TINY for value in (small / 2).tolist())


@needs_support
def test_a_setting_made_before_is_kept():
    torch.set_flush_denormal(True)
    with flushed_denormals():
        pass
    assert flushes_denormals()


@needs_support
def test_the_setting_comes_back_after_an_error():
    with pytest.raises(ValueError), flushed_denormals():
        raise ValueError
    assert not flushes_denormals()


@needs_support
def test_forward_and_backward_passes_of_training_flush_and_what_follows_does_not():
    weight, seen = nn.Parameter(torch.ones(4)), list[bool]()
    weight.register_hook(lambda gradient: seen.append(flushes_denormals()))

    def loss(rows: Tensor) -> Tensor:
        seen.append(flushes_denormals())
        return weight[rows].square().sum()

    Trainer().fit("train", [weight], 4, loss, Training(epochs=1, batch_size=2))
    assert seen == [True] * 4  # two steps, forward and backward
    assert not flushes_denormals()


@needs_support
def test_other_threads_flush_once_they_are_started_so():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 2**20  # half of it without start_flushing_threads


@needs_support
def test_the_setting_is_found_whatever_the_default_precision_is() -> None:
    torch.set_flush_denormal(True)
    torch.set_default_dtype(torch.float64)
    try:
        assert flushes_denormals()
    finally:
        torch.set_default_dtype(torch.float32)

"""Backbones every test may share. They are handed out frozen; a test that tunes one copies it first."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests run in several processes, one thread each

import pytest

from clipcil.clip import CLIP, load_clip
from clipcil.training.device import avoid_broken_amx
from support.towers import make_tiny_clip

if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers are given the variable it may set
    avoid_broken_amx()


@pytest.fixture(scope="session")
def mini() -> CLIP:
    return load_clip("mini")


@pytest.fixture(scope="session")
def tiny_clip() -> CLIP:
    return make_tiny_clip()

"""Backbones every test may share. They are handed out frozen; a test that tunes one copies it first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests run in several processes, one thread each

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `benchmarks` and `reproduce`
for folder in ("clip", "devices", "faults", "report"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

from helpers import make_tiny_clip

from clipcil.clip import CLIP, load_clip
from clipcil.training.device import avoid_broken_amx

if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers are given the variable it may set
    avoid_broken_amx()


@pytest.fixture(scope="session")
def mini() -> CLIP:
    return load_clip("mini")


@pytest.fixture(scope="session")
def tiny_clip() -> CLIP:
    return make_tiny_clip()

"""Random numbers of a stage that depend on nothing drawn before it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_random(*names: object) -> Iterator[None]:
    """Draw inside from a random state of its own, which follows from the run's seed and `names` alone.

    What is drawn inside then does not depend on what was drawn before, and what is drawn afterwards does not depend on
    what was drawn inside.
    """
    words = repr((torch.initial_seed(), *names)).encode()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int.from_bytes(hashlib.sha256(words).digest()[:7]))
        yield

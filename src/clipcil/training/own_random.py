"""Random states of a stage and of an experiment, which do not depend on draws elsewhere."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """The state of torch's generators, as it is kept with stages and checkpoints."""
    cuda = {"random.cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"random.cpu": torch.get_rng_state()} | cuda


def set_random_state(tensors: Mapping[str, Tensor]) -> None:
    """Restore what `random_state` returned; `tensors` may hold other things too."""
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])


class OwnState:
    """The random state of one experiment: draws inside and outside do not affect each other."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw inside from this state; the state outside is restored afterwards."""
        outside = random_state()
        set_random_state(self._kept or outside)
        try:
            yield
        finally:
            self._kept = random_state()
            set_random_state(outside)


@contextmanager
def own_random(*names: object) -> Iterator[None]:
    """Draw inside from a state made from the run's seed and `names`; the state outside does not change."""
    words = repr((torch.initial_seed(), *names)).encode()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int.from_bytes(hashlib.sha256(words).digest()[:7]))
        yield

"""Several processes that work on one run, through torch.distributed. With one process nothing here communicates.

Every process runs the same program with the same random state, so small computations are simply repeated. Passes
through a tower are divided: each process computes a share of the rows, and the shares are gathered.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipcil.errors import LostProcessError, first_line, quoted

T = TypeVar("T")


def world_size() -> int:
    """Number of processes of this run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Index of this process among them; process 0 writes the files."""
    return dist.get_rank() if world_size() > 1 else 0


def barrier() -> None:
    """Wait until every process is here."""
    if world_size() > 1:
        dist.barrier()


def from_first(value: T) -> T:
    """The value that process 0 has, in every process."""
    if world_size() == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


@contextmanager
def name_lost_processes(folder: Path) -> Iterator[None]:
    """Say in one line that another process of the run in `folder` has ended, whichever collective noticed it."""
    try:
        yield
    except RuntimeError as error:
        if world_size() == 1:
            raise
        raise LostProcessError(
            f"another process of this run ended or did not answer ({first_line(error)});"
            f" continue with: clipcil run --resume {quoted(folder)}"
        ) from error


def share(count: int) -> tuple[slice, list[int]]:
    """The rows of `count` that this process computes, and where each share begins: 0, …, `count`."""
    bounds = [index * count // world_size() for index in range(world_size() + 1)]
    return slice(bounds[rank()], bounds[rank() + 1]), bounds


def gather(own: Tensor, bounds: Sequence[int]) -> Tensor:
    """The shares (n_r, …) of all processes one after the other, with gradients; `bounds` from `share`."""
    if world_size() == 1:
        return own
    gathered: Tensor = _Gather.apply(own, bounds)  # type: ignore[no-untyped-call]
    return gathered


def spread(function: Callable[..., Tensor], *rows: Any) -> Tensor:
    """`function(*rows)`, each process computing the rows of its share; the result is the same in every process.

    Args:
        function: Maps B rows to a tensor (B, …); a row of the result depends on its own row of each argument alone.
        rows: Tensors or batches of B rows that can be sliced.

    Returns:
        (B, …). Gradients flow to this process's share; `average_gradients` makes them those of one process.
    """
    count = len(rows[0])
    if world_size() == 1 or count < world_size():  # too few rows to divide: every process computes all of them
        return function(*rows)
    own, bounds = share(count)
    return gather(function(*(each[own] for each in rows)), bounds)


class _Gather(torch.autograd.Function):
    """Forward: concatenate the shares. Backward: the gradient of the own share, times the number of processes.

    Every process computes the same loss from all rows. Computation that every process repeats gives the full gradient
    in each; divided computation gives each process its part. Scaling the part by the number of processes makes the
    average correct for both.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, bounds: Sequence[int]) -> Tensor:
        ctx.own = slice(bounds[rank()], bounds[rank() + 1])
        sizes = [end - start for start, end in pairwise(bounds)]
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.own] * world_size(), None


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replace every gradient by its mean over the processes, in one message."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if world_size() == 1 or not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= world_size()
    for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))

"""Tensors that claim to be on a GPU: a mode that fails where tensors of the CPU and of the claimed GPU meet.

No GPU is needed: the values stay on the CPU, and every tensor made for or moved to "cuda" is marked. An operation on a
marked and an unmarked tensor is what would fail on a real GPU, and raises `MixedDevicesError` here. What CUDA allows is
allowed: a CPU tensor of 0 dimensions beside GPU tensors, and CPU indices into a GPU tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

GPU, CPU = torch.device("cuda"), torch.device("cpu")
INDEXING = {"__getitem__", "__setitem__", "index_put_", "index_put", "index_select"}
HOST_ONLY = {"numpy", "__array__", "from_numpy"}


class MixedDevicesError(AssertionError):
    """An operation that a real GPU would refuse."""


def is_gpu(tensor: Tensor) -> bool:
    return getattr(tensor, "claims_gpu", False)


def mark(value: Any, gpu: bool) -> Any:
    if isinstance(value, Tensor):
        value.claims_gpu = gpu  # type: ignore[attr-defined]
    return value


class ClaimedDevices(TorchFunctionMode):
    """Inside this mode "cuda" is a place that tensors can claim to be on."""

    def __enter__(self) -> Any:
        original = self._new_parameter = nn.Parameter.__new__

        def new(cls: type, data: Tensor | None = None, requires_grad: bool = True) -> nn.Parameter:
            return mark(original(cls, data, requires_grad), data is not None and is_gpu(data))  # type: ignore[no-any-return]

        nn.Parameter.__new__ = new  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        nn.Parameter.__new__ = self._new_parameter  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__" and func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return GPU if is_gpu(args[0]) else CPU
        if func is torch.device or name in ("_parse_to", "_has_compatible_shallow_copy_type"):  # nothing is moved yet
            return func(*args, **kwargs)
        places_named = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.device | str)]
        wanted = [torch.device(each) for each in places_named if each in (GPU, CPU, "cuda", "cpu")]
        args = tree_map(lambda each: CPU if isinstance(each, torch.device) else each, tuple(args))
        kwargs = {key: CPU if isinstance(each, torch.device) else each for key, each in kwargs.items()}
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        places = [is_gpu(each) for each in tensors]
        result = func(*args, **kwargs)
        if name in HOST_ONLY and any(places):
            raise MixedDevicesError(f"{name} of a tensor on the GPU")
        if name in ("to", "copy_", "cpu"):
            gpu = places[0] if name == "copy_" or len(places) == 1 else places[1]
            gpu = wanted[0] == GPU if wanted else gpu and name != "cpu"
            if isinstance(result, Tensor) and result is tensors[0] and gpu != places[0]:
                result = result.clone()  # a real copy to another device is a tensor of its own
            return mark(result, gpu)
        if name == "__set__":  # parameter.data = tensor, parameter.grad = tensor
            if tensors[1:]:
                mark(tensors[0], places[1])
            return result
        if not tensors and not wanted:
            return result
        gpu = _place(name, tensors, places) if tensors else False
        gpu = wanted[0] == GPU if wanted else gpu  # a factory with a device
        return tree_map(lambda each: mark(each, gpu), result)


def _place(name: str, tensors: list[Tensor], places: list[bool]) -> bool:
    """Whether the result of an operation is on the GPU; an operation on tensors of both is refused."""
    if name in INDEXING and places[0]:
        return True  # indices may be on the CPU
    matters = {gpu for tensor, gpu in zip(tensors, places, strict=True) if gpu or tensor.dim() > 0}
    if len(matters) > 1:
        sides = [f"{'GPU' if gpu else 'CPU'} {tuple(tensor.shape)}" for tensor, gpu in zip(tensors, places)]
        raise MixedDevicesError(f"{name}: {', '.join(sides)}")
    return any(places)

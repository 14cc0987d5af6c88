"""Reading weight files without trusting them: safetensors only, every tensor checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from clipcil import storage
from clipcil.errors import UserError, first_line


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a backbone."""
    try:
        value = storage.read_json(path, links=True)  # the hub's own cache is made of links
    except storage.MissingFileError as error:
        raise UserError(f"{path} is missing; put the backbone's {path.name} there") from error
    except UserError as error:
        raise UserError(f"{error}; copy it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; copy it again from the backbone")
    return value


def shard_names(index: Path) -> list[str]:
    """The files in which an `…index.json` says the tensors are, without any folders before them.

    Raises:
        UserError: It names anything but safetensors files.
    """
    table = read_json(index).get("weight_map")
    names: list[Any] = list(table.values()) if isinstance(table, dict) else [None]
    if not all(isinstance(name, str) and name.endswith(".safetensors") for name in names):
        raise UserError(f"{index} does not say in which safetensors files the tensors are; copy it again")
    return sorted({Path(name).name for name in names})


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of the shards an `…index.json` names."""
    if path.name.endswith(".index.json"):
        tensors: dict[str, Tensor] = {}
        for shard in shard_names(path):
            tensors |= read_safetensors(path.parent / shard)
        return tensors
    if not path.is_file():
        raise UserError(f"{path} is missing; put the backbone's safetensors file there")
    try:
        return load_file(path)
    except SafetensorError as error:
        found = first_line(error)
        raise UserError(f"{path} is cut or damaged, or not safetensors ({found}); download it again") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def fill(module: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Put `tensors` into `module` as float32, whatever they were; anything missing, left over, misshapen or not finite
    is an error that names the first such tensor. `module` may be on the meta device."""
    wanted = module.state_dict()
    if missing := [name for name in wanted if name not in tensors]:
        raise UserError(f"{source}: tensor '{missing[0]}' is missing ({len(missing)} in all); the file is not complete")
    extra = [name for name in tensors if name not in wanted and not name.endswith("position_ids")]
    if extra:
        raise UserError(f"{source}: tensor '{extra[0]}' has no place in this CLIP ({len(extra)} in all); wrong config?")
    filled = {}
    for name, place in wanted.items():
        tensor = tensors[name]
        if tensor.shape != place.shape:
            found, needed = tuple(tensor.shape), tuple(place.shape)
            raise UserError(f"{source}: tensor '{name}' has shape {found}, the config needs {needed}; wrong config?")
        if not tensor.is_floating_point() or tensor.element_size() < 2:  # float8 too: torch cannot compute with it
            raise UserError(f"{source}: tensor '{name}' is {tensor.dtype}; quantised weights are not read")
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{source}: tensor '{name}' holds NaN or infinite values; the file is damaged")
        filled[name] = tensor.detach().to(torch.float32).contiguous()
    module.load_state_dict(filled, assign=True)

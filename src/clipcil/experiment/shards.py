"""Long tensors of a checkpoint in shards that are written once.

A memory of many classes grows at its end and hardly changes before it. Every full group of `ROWS` rows of a long tensor
is a file of its own, named by its SHA-256; a later checkpoint that holds the same rows names the same file and writes
only what is new.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors.torch import save
from torch import Tensor

from clipcil.errors import UserError
from clipcil.files import refuse_links, sweep_parts, write_bytes
from clipcil.reading import Between, read_tensors, typed

ROWS = 4096
"""Rows of a shard."""
_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
Table = dict[str, list[str]]
"""For each long tensor the SHA-256 of its shards, in order."""


def split(folder: Path, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Table]:
    """Write the full groups of rows of long tensors to `folder`.

    Returns:
        The tensors with what is left of the long ones, and the table of their shards.
    """
    refuse_links(folder)
    left, table = dict(tensors), {}
    for key, value in tensors.items():
        full = value.shape[0] // ROWS if value.dim() > 1 else 0
        if full and value.shape[0] > ROWS:
            parts = torch.split(value.detach().cpu(), ROWS)
            table[key] = [_write(folder, part) for part in parts[:full]]
            left[key] = value[full * ROWS :]
    return left, table


def join(folder: Path, tensors: dict[str, Tensor], table: Any) -> dict[str, Tensor]:
    """The tensors that `split` was given.

    Raises:
        UserError: A shard is missing or damaged.
    """
    known = typed(table, dict[str, list[Annotated[str, Between(64, 64)]]], "shards")
    whole = dict(tensors)
    for key, names in known.items():
        if key not in whole or any(not _NAME.fullmatch(f"{name}.safetensors") for name in names):
            raise UserError(f"the checkpoint in {folder.parent} names shards that cannot be its own")
        parts = [read_tensors(folder / f"{name}.safetensors", name).get("rows") for name in names]
        if any(part is None or part.shape[1:] != whole[key].shape[1:] for part in parts):
            raise UserError(f"a shard of '{key}' in {folder} does not fit; start the run anew")
        whole[key] = torch.cat([*(part for part in parts if part is not None), whole[key]])
    return whole


def keep_only(folder: Path, tables: Iterable[Table]) -> None:
    """Delete shards that none of the tables names, and what a killed process left half written."""
    if not folder.is_dir():
        return
    named = {f"{name}.safetensors" for table in tables for names in table.values() for name in names}
    sweep_parts(folder, lambda name: _NAME.fullmatch(name) is not None)
    for path in folder.iterdir():
        if _NAME.fullmatch(path.name) and path.name not in named:
            path.unlink()


def _write(folder: Path, rows: Tensor) -> str:
    data = save({"rows": rows.contiguous().clone()})
    name = hashlib.sha256(data).hexdigest()
    path = folder / f"{name}.safetensors"
    if not path.is_file() or path.stat().st_size != len(data):
        write_bytes(path, data)
    return name

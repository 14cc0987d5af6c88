"""What a run was made from: digests of its input files, and the versions of the machine it ran on."""

from __future__ import annotations

import hashlib
import os
import platform
import typing
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from clipcil import __version__
from clipcil.data.dataset import datasets
from clipcil.data.names import ANYTHING
from clipcil.errors import UserError
from clipcil.methods.registry import methods
from clipcil.storage import is_file, read_json, sha256, write_json


def inputs(table: dict[str, Any]) -> dict[str, str]:
    """A digest of every file and folder that the options and settings name and that is there: an order, descriptions,
    lists of a split, weights with the files beside them, pictures of one's own. A dataset that is the same everywhere
    is not digested: its folder may hold a million files."""
    run, known, method = table["run"], datasets().get(table["run"]["data"]), methods().get(table["run"].get("method"))
    named = _paths(method.Config, table["method"]) if method else {}
    if known:
        options = _paths(known.options, run.get("data_options", {}))
        named |= {f"data_options.{key}": value for key, value in options.items()}
    if is_file(order := Path(run.get("order", ""))):
        named["order"] = order
    if run.get("backbone", "mini") != "mini":
        named["backbone"] = backbone = Path(run["backbone"])
        if is_file(backbone):  # its config and its tokenizer
            beside = [path for pattern in ("*.json", "*.txt") for path in backbone.parent.glob(pattern)]
            named |= {f"backbone/{path.name}": path for path in beside}
    if run["data"] in ANYTHING and run.get("data_root"):
        named["data_root"] = Path(run["data_root"])
    return {key: digest for key, path in named.items() if (digest := _digest(path))}


def _paths(kind: type, values: Mapping[str, Any]) -> dict[str, Path]:
    """Those of the values that the dataclass `kind` says are paths: a word of another setting may name a file, too."""
    hints = typing.get_type_hints(kind)
    kinds = {key: (hints.get(key), *typing.get_args(hints.get(key))) for key in values}
    return {key: Path(value) for key, value in values.items() if Path in kinds[key]}


def inputs_changed(folder: Path, table: dict[str, Any]) -> bool:
    """Whether a file or folder that a run was made with is another one today. What is gone cannot be compared."""
    try:
        before = read_json(folder / "environment.json")["inputs"]
        return any(before.get(key, digest) != digest for key, digest in inputs(table).items())
    except (UserError, LookupError, TypeError, AttributeError):
        return False  # of a run made before these were kept


def _digest(path: Path) -> str:
    """Of a file its bytes; of a folder names, sizes and times of what is in it; empty where there is nothing."""
    with suppress(OSError, ValueError):
        if path.is_file():
            return sha256(path)
        if path.is_dir():
            found = hashlib.sha256()
            for place, folders, names in os.walk(path):
                folders.sort()
                for file in (Path(place) / name for name in sorted(names)):
                    status = file.lstat()
                    found.update(f"{str(file)!r} {status.st_size} {status.st_mtime_ns}".encode())
            return found.hexdigest()
    return ""


def write_inputs(folder: Path, made_from: dict[str, str]) -> None:
    """Record the input files that the results in `folder` were made from, once the results are there.

    Input files may have changed since the run began: before its first checkpoint, or in files that no checkpoint
    depends on.

    Args:
        folder: The run.
        made_from: The digests that `inputs` returned when the run began or continued.
    """
    path = folder / "environment.json"
    try:
        kept = read_json(path)
        now = {**kept["inputs"], **made_from}  # a file that is gone now was there when the run began
    except (UserError, LookupError, TypeError):  # the file was deleted while the run went on
        return
    if now != kept["inputs"]:
        write_json(path, {**kept, "inputs": now})


def environment() -> dict[str, Any]:
    """Versions and machine, to explain later why a number differs."""
    packages = ("torch", "lightning-fabric", "numpy", "tokenizers", "pillow", "safetensors")
    versions = {name: metadata.version(name) for name in packages}
    machine = {"machine": platform.machine(), "system": platform.system(), "cores": os.cpu_count()}
    return {
        "clipcil": __version__,
        "python": platform.python_version(),
        **versions,
        **machine,
        "threads": torch.get_num_threads(),
    }

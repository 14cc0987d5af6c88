"""Finished runs, in their own folders or among kept ones, and the input files that a run was made from."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import typing
from collections.abc import Mapping, Sequence
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
from clipcil.report.runs import RunRecord, find_runs, read_run
from clipcil.storage import is_file, read_json, sha256, write_json

RUN_FILES = ("matrix.csv", "predictions.csv", "steps.jsonl")
"""Files that a finished run has beside `results.json`."""


def finished_run(folder: Path, table: dict[str, Any]) -> RunRecord | None:
    """The results in `folder`, or None where they are incomplete or of other options and settings.

    Args:
        folder: Folder of the run.
        table: Options and settings, as in `config.toml`.
    """
    if not all((folder / name).is_file() for name in RUN_FILES):
        return None
    try:
        found = read_run(folder)
    except UserError:  # damaged results are made again from the last checkpoint
        return None
    same = json.dumps(found.config, sort_keys=True) == json.dumps(table, sort_keys=True)
    return found if same and not inputs_changed(folder, table) else None


class FinishedRuns:
    """Finds the results of a run in its own folder, or among kept runs with the same options and settings.

    Args:
        kept: Folders of runs or of evidence.

    Raises:
        UserError: One of them holds no finished run.
    """

    def __init__(self, kept: Sequence[Path] = ()) -> None:
        runs = find_runs(kept)
        self._kept = {_options_key(run.config): run for run in runs}
        self._devices = {_options_key(run.config, "device"): str(run.run.get("device")) for run in runs}

    def find(self, folder: Path, table: dict[str, Any]) -> RunRecord | None:
        """The results of exactly these options and settings, or None."""
        if (done := finished_run(folder, table)) is not None:
            return done
        return None if inputs(table) else self._kept.get(_options_key(table))  # evidence has no digests of inputs

    def other_device(self, folder: Path, table: dict[str, Any]) -> str:
        """The device of a kept run that differs only in its device, where this run is not finished; else empty."""
        return "" if self.find(folder, table) else self._devices.get(_options_key(table, "device"), "")


def _options_key(table: dict[str, Any], *without: str) -> str:
    """Options and settings as text, without unset options and without the folder of a dataset that has a name."""
    run = {key: value for key, value in table["run"].items() if value is not None and key not in without}
    if run["data"] not in ANYTHING:
        run.pop("data_root", None)
    return json.dumps([run, table["method"]], sort_keys=True, default=str)


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

"""Checkpoints: after every task the whole method, inside a task a snapshot of every stage after each epoch.

Tensors are safetensors, the rest JSON with the checksum of what it belongs to; each file is written under another name
and renamed. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from clipcil.errors import UserError
from clipcil.files import sha256, uninterrupted, whole_file, write_json
from clipcil.methods.base import Method
from clipcil.methods.training import Snapshot

KEEP = 2
"""Whole checkpoints kept: the newest, and the one before it in case the newest is damaged."""


def save_tensors(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """`path` (safetensors) and, once that is whole, `path`.json with its checksum and `facts`."""
    with uninterrupted():
        with whole_file(path) as part:
            save_file({key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}, part)
        write_json(path.with_suffix(".json"), {**facts, "sha256": sha256(path)})


def drop_tensors(path: Path) -> None:
    path.with_suffix(".json").unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The pair written by `save_tensors`; a UserError names what is damaged."""
    manifest = path.with_suffix(".json")
    try:
        facts = json.loads(manifest.read_text(encoding="utf-8"))
        if not isinstance(facts, dict) or facts.get("sha256") != sha256(path):
            raise UserError(f"{path} does not match its checksum")
        return load_file(path), facts
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path} is damaged or incomplete ({type(error).__name__})") from error


def method_state(method: Method) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything of a method that a later session needs: tensors, and the names and sizes that shape them."""
    return dict(method.state_dict()), {"names": method.names, "sizes": method.sizes}


def restore_method(method: Method, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Make a fresh method what it was: replay `grow` for every task, then fill in the values."""
    start = 0
    for size in facts["sizes"]:
        method.grow(facts["names"][start : start + size])
        start += size
    try:
        method.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(f"the checkpoint does not fit {method.name}: {str(error).splitlines()[-1].strip()}") from error
    if method.tunes_tower:
        method.clip.touch()


@dataclass
class Loaded:
    """A checkpoint found on disk."""

    tasks: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class CheckpointFolder:
    """`checkpoint/task-004.safetensors` and `.json`: the run after four tasks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, tasks: int, method: Method, facts: dict[str, Any]) -> None:
        tensors, shape = method_state(method)
        tensors = {f"method.{key}": value for key, value in tensors.items()}
        tensors["random.cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        save_tensors(self._path(tasks), tensors, {**facts, **shape, "tasks": tasks})
        for old in range(tasks - KEEP, -1, -1):
            drop_tensors(self._path(old))

    def newest(self, tell: Callable[[str], None]) -> Loaded | None:
        """The newest whole checkpoint; a damaged one is named and the one before it is used."""
        for path in sorted(self.folder.glob("task-*.safetensors"), reverse=True):
            try:
                tensors, facts = load_tensors(path)
                return Loaded(int(facts["tasks"]), tensors, facts)
            except UserError as error:
                tell(f"{error}; going back to the checkpoint before it")
        return None

    def restore(self, loaded: Loaded, method: Method) -> None:
        own = {key[7:]: value for key, value in loaded.tensors.items() if key.startswith("method.")}
        restore_method(method, own, loaded.facts)
        torch.set_rng_state(loaded.tensors["random.cpu"])
        if "random.cuda" in loaded.tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(loaded.tensors["random.cuda"])

    def _path(self, tasks: int) -> Path:
        return self.folder / f"task-{tasks:04d}.safetensors"


class SnapshotFolder:
    """`checkpoint/stages-0004/stage1-0003.safetensors`: a stage of the task under way after three epochs."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self.folder, self.tell = folder, tell

    def save(self, task: int, stage: str, snapshot: Snapshot, log_size: int) -> None:
        older = self._paths(task, stage)
        path = self._folder(task) / f"{stage}-{snapshot.epoch:04d}.safetensors"
        save_tensors(path, snapshot.tensors, {"epoch": snapshot.epoch, "log_size": log_size})
        for old in older:  # only now: a process killed before this line still has the older one
            if old != path:
                drop_tensors(old)

    def load(self, task: int, stage: str) -> tuple[Snapshot, int] | None:
        for path in self._paths(task, stage):
            try:
                tensors, facts = load_tensors(path)
                return Snapshot(int(facts["epoch"]), tensors), int(facts["log_size"])
            except UserError as error:
                self.tell(f"{error}; going back to the one before it")
        return None

    def clear(self) -> None:
        """A task has its checkpoint: its stages are not needed any more."""
        for folder in self.folder.glob("stages-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, task: int) -> Path:
        return self.folder / f"stages-{task:04d}"

    def _paths(self, task: int, stage: str) -> list[Path]:
        return sorted(self._folder(task).glob(f"{stage}-????.safetensors"), reverse=True)

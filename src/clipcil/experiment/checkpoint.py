"""Checkpoints of the whole method after every task, and snapshots of every stage after each epoch of a task.

Tensors are safetensors, the rest JSON with the checksum of what it belongs to; each file is written under another name
and renamed. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from clipcil.errors import UserError, first_line
from clipcil.experiment import shards
from clipcil.files import refuse_links, sha256, sweep_parts, uninterrupted, whole_file, write_json
from clipcil.methods.base import Method
from clipcil.reading import Between, Count, Text, read_json, read_tensors, typed
from clipcil.training.loop import Snapshot
from clipcil.training.own_random import random_state, set_random_state

Size = Annotated[int, Between(1, 10**6)]
KEEP = 2
"""Whole checkpoints kept: the newest, and the one before it in case the newest is damaged."""

SHARDS = "shards"
"""Folder of the shards, inside the folder of the checkpoints."""

RUN_FILES = (
    "config.toml",
    "environment.json",
    "results.json",
    "matrix.csv",
    "predictions.csv",
    "timing.json",
    "steps.jsonl",
    "error.txt",
)
"""The files of a run, beside the folder `checkpoint`."""
_SNAPSHOT = re.compile(r"\d{2,}-[\w.]+-\d{4,}")
_CHECKPOINT = re.compile(rf"(task-\d{{4,}}|{_SNAPSHOT.pattern})\.(safetensors|json)")


def save_tensors(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """`path` (safetensors) and, once that is whole, `path`.json with its checksum and `facts`."""
    for key, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise UserError(f"training diverged: '{key}' holds a NaN or an infinity; try a lower learning rate")
    plain = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
    with uninterrupted():
        try:
            with whole_file(path) as part:
                save_file(plain, part)
                checksum = sha256(part)
        except SafetensorError as error:  # its writer reports a full disk in its own way
            reason = first_line(error).removeprefix("Error while serializing: ")
            raise UserError(f"cannot write {path}: {reason}") from error
        write_json(path.with_suffix(".json"), {**facts, "sha256": checksum})


def drop_tensors(path: Path) -> None:
    path.with_suffix(".json").unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The pair written by `save_tensors`; a UserError names what is damaged."""
    manifest = path.with_suffix(".json")
    facts = typed(read_json(manifest), dict, manifest.name)
    checksum = typed(facts.get("sha256"), Annotated[str, Between(64, 64)], f"sha256 in {manifest}")
    return read_tensors(path, checksum), facts


def method_state(method: Method) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything of a method that a later session needs: tensors, and the names and sizes that shape them."""
    return dict(method.state_dict()), {"names": method.names, "sizes": method.sizes}


def restore_method(method: Method, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Restore a new method: call `grow` for every task, then load the values."""
    names, sizes = typed(facts.get("names"), list[Text], "names"), typed(facts.get("sizes"), list[Size], "sizes")
    if sum(sizes) != len(names):
        raise UserError(f"the checkpoint does not fit {method.name}: {len(names)} names for {sum(sizes)} classes")
    try:
        start = 0
        for size in sizes:
            method.grow(names[start : start + size])
            start += size
        method.load_state_dict(tensors)
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the checkpoint does not fit {method.name}: {first_line(error)}") from error
    if method.tunes_tower:
        method.clip.touch()


@dataclass
class Loaded:
    """A checkpoint found on disk."""

    tasks: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class CheckpointFolder:
    """`checkpoint/task-0004.safetensors` and `.json`: the run after four tasks.

    `belongs` says which run these are the checkpoints of (method, backbone, dataset, class order, settings). It is
    stored in every checkpoint, and one of another run is refused: a file copied from there may have the same shapes.
    """

    def __init__(self, folder: Path, belongs: dict[str, Any]) -> None:
        refuse_links(folder)
        self.folder, self.belongs = folder, json.loads(json.dumps(belongs))
        self._tables: dict[int, shards.Table] = {}

    def save(self, tasks: int, method: Method, facts: dict[str, Any]) -> None:
        tensors, shape = method_state(method)
        tensors = {f"method.{key}": value for key, value in tensors.items()}
        tensors, table = shards.split(self.folder / SHARDS, tensors | random_state())
        facts = {**facts, **shape, "tasks": tasks, "belongs": self.belongs, "shards": table}
        save_tensors(self._path(tasks), tensors, facts)
        self._tables[tasks] = table
        for path in self._paths():
            if not tasks - KEEP < _number(path) <= tasks:
                drop_tensors(path)
                self._tables.pop(_number(path), None)
        shards.keep_only(self.folder / SHARDS, self._tables.values())

    def newest(self, tell: Callable[[str], None]) -> Loaded | None:
        """The newest whole checkpoint; a damaged one is named and the one before it is used."""
        for path in self._paths():
            try:
                tensors, facts = load_tensors(path)
                tensors = shards.join(self.folder / SHARDS, tensors, facts.get("shards", {}))
            except UserError as error:
                tell(f"{error}; going back to the checkpoint before it")
                continue
            self._check(path, facts)
            self._tables[int(facts["tasks"])] = facts.get("shards", {})
            return Loaded(int(facts["tasks"]), tensors, facts)
        return None

    @staticmethod
    def restore(loaded: Loaded, method: Method) -> None:
        """Restore a new method and the random state from a checkpoint."""
        own = {key.removeprefix("method."): value for key, value in loaded.tensors.items() if key.startswith("method.")}
        restore_method(method, own, loaded.facts)
        try:
            set_random_state(loaded.tensors)
        except (RuntimeError, LookupError, TypeError) as error:
            raise UserError(f"the checkpoint after task {loaded.tasks} has no random state; start anew") from error

    def _check(self, path: Path, facts: dict[str, Any]) -> None:
        found = facts.get("belongs")
        if difference := first_difference(found if isinstance(found, dict) else {}, self.belongs):
            raise UserError(f"{path} belongs to another run ({difference}); put the right file back or start anew")
        if facts.get("tasks") != _number(path):
            raise UserError(f"{path} says that it stands after task {facts.get('tasks')}; it was renamed")

    def _path(self, tasks: int) -> Path:
        return self.folder / f"task-{tasks:04d}.safetensors"

    def _paths(self) -> list[Path]:
        """Newest first. A checkpoint of which one of the two files is gone counts, so that it is named."""
        found = {path.with_suffix(".safetensors") for path in self.folder.glob("task-*.*")}
        return sorted((path for path in found if re.fullmatch(r"task-\d{4,}", path.stem)), key=_number, reverse=True)


class SnapshotFolder:
    """`checkpoint/stages-0004/01-stage2-0003.safetensors`: a stage of the task under way after three epochs.

    The number in front is the stage's place in the task. Training a stage makes what was kept of the stages after it
    stale, so it is dropped: the step log, which grows with them, would otherwise have a gap.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        refuse_links(folder, *folder.glob("stages-*"))
        self.folder, self.tell = folder, tell
        self.mark = ""
        """Fingerprint of the run, as `run_mark` makes it."""

    def save(self, task: int, place: int, stage: str, snapshot: Snapshot, log_size: int) -> None:
        path = self._folder(task) / f"{place:02d}-{_plain(stage)}-{snapshot.epoch:04d}.safetensors"
        save_tensors(path, snapshot.tensors, {"epoch": snapshot.epoch, "log_size": log_size, "mark": self.mark})
        whole = [old for old in self._paths(task, place) if _place_and_epoch(old) <= (place, snapshot.epoch)]
        later = [old for old in self._paths(task) if _place_and_epoch(old) > (place, snapshot.epoch)]
        for old in (*whole[KEEP:], *later):  # only now: a process killed before this line still has the older ones
            drop_tensors(old)

    def load(self, task: int, place: int) -> tuple[Snapshot, int] | None:
        """The newest whole snapshot of the stage that comes at `place`, and the size of the step log then."""
        for path in self._paths(task, place):
            try:
                tensors, facts = load_tensors(path)
                if facts.get("mark") != self.mark:
                    raise UserError(f"{path} belongs to another run")
                epoch, size = (typed(facts.get(key), Count, f"{key} in {path}") for key in ("epoch", "log_size"))
                return Snapshot(epoch, tensors), size
            except UserError as error:
                self.tell(f"{error}; going back to the one before it")
        return None

    def clear(self, keep: int | None = None) -> None:
        """Forget the stages of all tasks, or of all but task `keep`."""
        for folder in self.folder.glob("stages-*"):
            if keep is None or folder != self._folder(keep):
                shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, task: int) -> Path:
        return self.folder / f"stages-{task:04d}"

    def _paths(self, task: int, place: int | None = None) -> list[Path]:
        """Those of a task, or of the stage at one place in it, newest first."""
        found = [path for path in self._folder(task).glob("*.safetensors") if _SNAPSHOT.fullmatch(path.stem)]
        own = [path for path in found if place is None or _place_and_epoch(path)[0] == place]
        return sorted(own, key=_place_and_epoch, reverse=True)


def sweep_run(out: Path) -> None:
    """Delete what a killed process left half written in the folder of a run; the caller has seen that it is one."""
    sweep_parts(out, RUN_FILES.__contains__)
    for folder in (out / "checkpoint", *(out / "checkpoint").glob("stages-*")):
        sweep_parts(folder, lambda name: _CHECKPOINT.fullmatch(name) is not None)


def run_mark(belongs: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(belongs, sort_keys=True).encode()).hexdigest()[:24]


def first_difference(found: dict[str, Any], asked: dict[str, Any], where: str = "") -> str:
    """The first entry in which two tables differ, as a phrase for a message; empty where they agree."""
    for key in sorted({*found, *asked}, key=lambda key: (key != "run", key)):  # the method's name before its settings
        a, b = found.get(key), asked.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            if inner := first_difference(a, b, f"{where}{key}."):
                return inner
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b) > 3 and a != b:
            place = next(i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1])
            return f"its {where}{key}[{place}] is {_show(a[place])}, not {_show(b[place])}"
        elif json.dumps(a) != json.dumps(b):
            return f"its {where}{key} is {_show(a)}, not {_show(b)}"
    return ""


def _show(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("task-"))


def _place_and_epoch(path: Path) -> tuple[int, int]:
    """Of a snapshot: the place of its stage in the task, and its epoch, which may have more than four digits."""
    return int(path.stem.partition("-")[0]), int(path.stem.rpartition("-")[2])


def _plain(stage: str) -> str:
    return re.sub(r"[^\w.]", "_", stage)

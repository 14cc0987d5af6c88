"""The folder of a run.

`config.toml`, `results.json`, `matrix.csv`, `predictions.csv` and `steps.jsonl` have the same bytes for the same seed
on a CPU; what differs from run to run (seconds, versions) stands in `timing.json` and `environment.json`.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from clipcil import __version__
from clipcil.data.dataset import datasets
from clipcil.data.names import ANYTHING
from clipcil.errors import UserError, printable, quoted
from clipcil.experiment.checkpoint import RUN_FILES, first_difference
from clipcil.experiment.monitor import RunMonitor, peak_megabytes
from clipcil.files import LOCK, part_names, sha256, write_json, write_text, write_toml
from clipcil.methods.registry import methods
from clipcil.reading import is_file, read_json, read_toml
from clipcil.report.answers import PACKED, PLAIN
from clipcil.report.runs import RunResult, find_runs, read_run

if TYPE_CHECKING:
    from clipcil.clip import CLIP
    from clipcil.data.stream import TaskStream
    from clipcil.experiment.results import Results

ERROR = "error.txt"
"""The traceback of a run of a grid that failed."""


def check_start(folder: Path, table: dict[str, Any], resume: bool) -> None:
    """Refuse a folder that holds another run, before anything is loaded or written."""
    path = folder / "config.toml"
    if not path.exists():
        left = {LOCK, ERROR, *part_names(folder, RUN_FILES.__contains__)}  # by a run killed while it began
        if folder.is_dir() and any(entry.name not in left for entry in folder.iterdir()):
            raise UserError(f"{folder} is not empty and holds no run; name a new folder with --out")
        return
    check_same(folder, read_toml(path), table)
    if is_kept(folder):  # evidence, which a run of today would replace
        raise UserError(f"{folder} holds a kept run, which cannot be continued; name another folder with --out")
    if not resume:
        raise UserError(
            f"{folder} holds this run already; continue it with --resume {quoted(folder)} (in Python with run(folder)),"
            " or name another"
        )


def check_installed(folder: Path, run: dict[str, Any]) -> None:
    """Refuse to continue a run of a dataset or method that nobody here knows by its name."""
    for key, called, known in (("data", "dataset", datasets()), ("method", "method", methods())):
        if isinstance(name := run.get(key), str) and name not in known:
            raise UserError(
                f"{folder} is a run of the {called} '{name}', which is not installed here; where it was given in"
                " Python, make the same Experiment again and call run(folder), which continues"
            )


def check_same(folder: Path, found: dict[str, Any], asked: dict[str, Any]) -> None:
    """Refuse to continue a run with other options than it was begun with."""
    if difference := first_difference(found, asked):
        raise UserError(f"{folder} holds another run ({difference}); name another folder with --out")


def write_start(folder: Path, table: dict[str, Any], clip: CLIP, made_from: dict[str, str]) -> list[str]:
    """Claim the folder for this run; `made_from` are its `inputs`. Returns what a person should know about it."""
    if not (folder / "config.toml").exists():
        write_toml(folder / "config.toml", table)
    now = {**environment(), "backbone": clip.pinned, "fingerprint": clip.fingerprint, "inputs": made_from}
    try:
        kept = read_json(folder / "environment.json")
        before = kept["threads"]
        now["inputs"] = kept.get("inputs", now["inputs"])  # of the results that are there, until this run has ended
    except (UserError, LookupError, TypeError, AttributeError):
        before = now["threads"]
    write_json(folder / "environment.json", now)
    if before == now["threads"]:
        return []
    return [
        f"begun with {printable(before)} threads, continued with {now['threads']}: sums are added in another order, so"
        f" losses and drift can differ in their last digits; OMP_NUM_THREADS={printable(before)} gives the same bytes"
    ]


def write_results(folder: Path, results: Results, stream: TaskStream, monitor: RunMonitor) -> None:
    """Write the results of a run that has ended."""
    write_text(folder / "matrix.csv", results.matrix_csv())
    write_text(folder / "predictions.csv", results.predictions_csv(stream))
    seconds = {name: round(value, 3) for name, value in monitor.seconds.items()}
    finished = datetime.date.today().isoformat()
    write_json(folder / "timing.json", {"seconds": seconds, "peak_megabytes": peak_megabytes(), "finished": finished})
    write_json(folder / "results.json", results.as_dict())  # last: its presence says that the run is complete


def write_inputs(folder: Path, made_from: dict[str, str]) -> None:
    """Say which files the results in `folder` were made from, once they are there.

    They may be others than those it was begun with: it was killed before its first checkpoint, or what has changed
    since is nothing that its checkpoints depend on, such as a file beside the pictures.

    Args:
        folder: The run.
        made_from: What `inputs` returned when it began or continued.
    """
    try:
        kept = read_json(folder / "environment.json")
        now = {**kept["inputs"], **made_from}  # what is gone today was there when the run began
    except (UserError, LookupError, TypeError):  # taken away while it ran
        return
    if now != kept["inputs"]:
        write_json(folder / "environment.json", {**kept, "inputs": now})


def read_config(folder: Path) -> dict[str, Any]:
    """The tables `run` and `method` of the run in `folder`."""
    path = folder / "config.toml"
    if not path.is_file():
        raise UserError(f"{folder} holds no run (there is no config.toml in it)")
    table = read_toml(path)
    for part in ("run", "method"):
        if not isinstance(table.get(part), dict):
            raise UserError(f"{path} is damaged: it has no table [{part}]; put the right one back or start anew")
    return table


def is_kept(folder: Path) -> bool:
    """Whether the run in `folder` is one that `clipcil claims --keep` has written."""
    return (folder / PACKED).is_file() and not (folder / PLAIN).exists()


def finished_run(folder: Path, table: dict[str, Any]) -> RunResult | None:
    """The results in `folder` if they are complete and of exactly these options and settings."""
    if not is_kept(folder) and not all((folder / name).is_file() for name in ("matrix.csv", PLAIN, "steps.jsonl")):
        return None
    try:
        found = read_run(folder)
    except UserError:  # damaged results are made again from the last checkpoint
        return None
    same = json.dumps(found.values["config"], sort_keys=True) == json.dumps(table, sort_keys=True)
    return found if same and not _inputs_changed(folder, table) else None


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


def _inputs_changed(folder: Path, table: dict[str, Any]) -> bool:
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


class FinishedRuns:
    """Finds the results of a run in its own folder or among kept ones, which are found by options and settings.

    Args:
        kept: Folders of kept runs.

    Raises:
        UserError: One of them is no folder, or holds no finished run.
    """

    def __init__(self, kept: Sequence[Path] = ()) -> None:
        runs = find_runs(kept)
        self._kept = {_options_key(run.values["config"]): run for run in runs}
        self._devices = {_options_key(run.values["config"], "device"): str(run.run.get("device")) for run in runs}

    def find(self, folder: Path, table: dict[str, Any]) -> RunResult | None:
        """The results of exactly these options and settings; None where there are none."""
        if (done := finished_run(folder, table)) is not None:
            return done
        return None if inputs(table) else self._kept.get(_options_key(table))  # a kept run does not hold its `inputs`

    def other_device(self, folder: Path, table: dict[str, Any]) -> str:
        """The device of a kept run that differs from this one in nothing else, where this one is not finished."""
        return "" if self.find(folder, table) else self._devices.get(_options_key(table, "device"), "")


def _options_key(table: dict[str, Any], *without: str) -> str:
    """Options and settings without those that were not given, and without the place of a dataset that has a name."""
    run = {key: value for key, value in table["run"].items() if value is not None and key not in without}
    if run["data"] not in ANYTHING:
        run.pop("data_root", None)
    return json.dumps([run, table["method"]], sort_keys=True, default=str)


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


def fresh_folder(what: str) -> Path:
    """`runs/2026-01-31-what`, followed by a number where that exists."""
    stem = f"{datetime.date.today().isoformat()}-{what}"
    for number in range(1, 10_000):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        if not folder.exists():
            return folder
    raise UserError("runs/ holds ten thousand runs of today; name a folder with --out")

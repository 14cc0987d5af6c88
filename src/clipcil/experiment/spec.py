"""The options of an experiment, each named and explained once; importing this needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field, fields, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt, ValidationInfo, field_validator

from clipcil.errors import UserError, nearest, quoted
from clipcil.plugins import LOADED
from clipcil.settings import merge, options, override, to_dict
from clipcil.storage import read_toml

if TYPE_CHECKING:
    from clipcil.methods.base import Method

TASKS = 10
"""Number of tasks where neither tasks nor increment is given and there are as many classes."""
PROCESSES = ("devices", "nodes")
"""Options that do not determine the result."""
PER_RUN = {"method", "data", "data_root", "data_options", "seed", "code", *PROCESSES}
"""Options that are not shared by the runs of a grid: it has its own options for them, and its own processes."""

Processes = Annotated[int, Field(ge=1, le=4096)]
UpTo1000 = Annotated[int, Field(ge=1, le=1000)]


@options
class RunSpec:
    """The options of a run outside the method. Together with the method's settings they determine the result."""

    method: str = "dmc-ot"
    """The method; `clipcil methods` lists them."""
    data: str = "emoji"
    """The dataset (`clipcil datasets` lists them), a folder of class/picture, or a file that registers a dataset."""
    data_root: Path | None = None
    """Folder that holds the dataset, or a folder for each dataset."""
    data_options: dict[str, Any] = field(default_factory=dict)
    """Options of the dataset, such as split=random; `clipcil datasets NAME` lists them."""
    skip_broken: bool = False
    """Leave out pictures that cannot be decoded, and list them, instead of stopping at the first."""
    increment: int | None = None
    """Classes per task, instead of a number of tasks."""
    tasks: int | None = None
    """Number of tasks. Default: 10, or one per class where there are fewer classes."""
    base: int | None = None
    """Classes in the first task, where it is larger than the others."""
    order: str = "seed:1993"
    """Class order: natural, seed:N, icarl, or a file with a class in each line, by name or index. seed:1993 is the
    order most of the field uses."""
    backbone: str = "mini"
    """mini (embedded), a Hugging Face id or folder, or a file of OpenAI's or open_clip's."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed of everything random."""
    shots: PositiveInt | None = None
    """At most this many training pictures per class."""
    hold_out: PositiveInt | None = None
    """For choosing settings: measure on this many training pictures of each class instead of the test pictures. They
    are drawn by the seed and are not learnt."""
    test_sample: PositiveInt | None = None
    """Evaluate each old task on at most this many of its test pictures; the last evaluation uses all of them."""
    device: str = "auto"
    """cpu, cuda, or auto: CUDA if there is one, else the CPU."""
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """32-true, bf16-mixed, 16-mixed, or auto: bf16-mixed on a CPU where it is faster, else 32-true. Parameters are in
    single precision in each of them."""
    devices: Processes = 1
    """Devices of this machine that work on the run together, one process each; the result is the same to rounding."""
    nodes: Processes = 1
    """Machines that work on the run together, started by torchrun or Slurm; the run folder is on storage they share."""
    code: tuple[str, ...] | None = None
    """The files that define the method or the dataset, with the digests of their contents; filled in."""

    def __post_init__(self) -> None:
        if self.tasks is not None and self.increment is not None:
            raise UserError("give the number of tasks or the increment, not both")


@options
class Grid:
    """The options of a grid of runs: methods or rows of a table of the paper × datasets × seeds."""

    table: str | None = None
    """A table of the paper. Without one: the methods and datasets named, on the embedded backbone."""
    methods: tuple[str, ...] = ()
    """Methods (names, patterns, files such as mine.py, or all). Default: all of the table, or all there are."""
    only: tuple[str, ...] = ()
    """Run only the methods, rows and datasets that match these patterns."""
    data: tuple[str, ...] = ()
    """Datasets, or files that register one; a folder of your own is --data folder --data-root DIR. Default: those of
    the table, or emoji."""
    seeds: UpTo1000 = 1
    """Number of seeds: 3 means 0, 1 and 2."""
    orders: tuple[str, ...] = ()
    """Class orders; every run is done once for each. Default: those of the table, or the one of --order."""
    data_root: tuple[str, ...] = ()
    """A folder with a folder for each dataset, or words dataset=folder."""
    data_options: tuple[str, ...] = ()
    """Options of the datasets, such as split=random; ignored for a dataset that has no such option."""
    set: tuple[str, ...] = ()
    """Settings of the methods; ignored for a method that has no such setting."""
    out: Path = Path("runs/bench")
    """Folder that holds a folder for each run, and results.jsonl."""
    kept: tuple[Path, ...] = ()
    """Folders of runs or of evidence, such as reproduce/evidence: a run that is there with the same
    settings, data options and device is not repeated."""
    jobs: UpTo1000 = 1
    """Runs at the same time, each in a process of its own with one thread; 1: one after the other in this process."""
    on: Literal["here", "ray"] = "here"
    """here: on this machine; ray: each run is a task of a Ray cluster (needs the extra ray), and --out a folder that
    all its machines share."""
    address: str | None = None
    """Address of the Ray cluster, or auto. Default: start a Ray cluster on this machine."""
    cpus_per_run: Annotated[float, Field(ge=0.01, le=10_000)] = 1.0
    """Number of cores, and of threads, of each run on Ray."""
    gpus_per_run: Annotated[float, Field(ge=0, le=10_000)] = 0.0
    """Number of GPUs of each run on Ray; above 0, --device is cuda."""
    run: dict[str, Any] = field(default_factory=dict)
    """Options of `RunSpec` that all runs share."""

    @field_validator("methods", "only", "data", "orders")
    @classmethod
    def _split(cls, words: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        """`a,b c` → a, b, c."""
        parts = tuple(dict.fromkeys(part for word in words for part in word.split(",") if part))
        if words and not parts:  # a variable of the shell that is not set; left out, the option would mean all
            raise UserError(f"--{info.field_name} is given but names nothing; name at least one, or leave it out")
        return parts

    @field_validator("run")
    @classmethod
    def _choose_device(cls, run: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return {"device": "cuda", **run} if info.data.get("gpus_per_run") else run

    def __post_init__(self) -> None:
        if self.on == "ray" and self.jobs > 1:
            raise UserError("give --jobs or --on ray, not both: Ray runs as many at a time as its machines hold")
        if self.on != "ray" and (self.address is not None or self.gpus_per_run or self.cpus_per_run != 1):
            raise UserError("--address, --cpus-per-run and --gpus-per-run are for --on ray; give that, too")
        if self.orders and "order" in self.run:
            raise UserError("give --order or --orders, not both")


def read_preset(data: str, name: str, backbone: str) -> dict[str, Any]:
    """The settings kept under this name for this dataset, and for this backbone where the preset names it."""
    found: dict[str, Any] = {}
    presets = resources.files("clipcil") / "presets"
    folders = {folder.name for folder in presets.iterdir()}  # the name in a stranger's results may be any text
    for folder in ("any", data):
        if folder in folders and (file := presets / folder / f"{name}.toml").is_file():
            with resources.as_file(file) as path:
                values = read_toml(path, links=True)
            special = values.pop("backbone", {})
            found = merge(found, values, special.get(backbone, {}))
    return found


def method_settings(
    spec: RunSpec, given: Mapping[str, Any], preset: bool = True, kind: type[Method] | None = None
) -> Any:
    """The config of the method of a run: its defaults, then the preset, then what is given.

    Method, data and backbone of the run select the preset. `kind` is the class of a method that is not registered.
    """
    from clipcil.methods.registry import find_method

    kind = kind or find_method(spec.method)
    config = kind.Config()
    if preset:
        try:
            config = override(config, read_preset(spec.data, kind.presets or spec.method, spec.backbone))
        except UserError as error:
            raise UserError(f"preset {spec.data}/{spec.method}: {error}") from error
    return override(config, given)


def resolved(spec: RunSpec, kind: type[Method] | None = None) -> RunSpec:
    """The same run with every choice made: device, precision, options of its dataset, a folder as dataset `folder`."""
    from clipcil.data.dataset import datasets, find_dataset, resolve_options
    from clipcil.methods.registry import find_method

    if spec.data and spec.data not in datasets() and Path(spec.data).is_dir():  # Path("") is the current folder
        spec = replace(spec, data="folder", data_root=Path(spec.data))
    options = to_dict(resolve_options(spec.data, spec.data_options))
    code = files_of(kind or find_method(spec.method), find_dataset(spec.data).open)
    return replace(placed(spec), data_options=options, code=code)


def placed(spec: RunSpec) -> RunSpec:
    """The same run with its device and precision chosen."""
    from clipcil.training.device import find_device, find_precision

    device = find_device(spec.device)
    return replace(spec, device=device, precision=find_precision(spec.precision, device))


def files_of(*things: Any) -> tuple[str, ...] | None:
    """The modules of classes and functions that are from files which the user named; None where there is none."""
    return tuple(dict.fromkeys(each.__module__ for each in things if each.__module__ in LOADED)) or None


def as_table(spec: RunSpec, config: Any) -> dict[str, Any]:
    """Options and settings as `config.toml` holds them; the number of processes is not one: it may change on resume."""
    run = {key: value for key, value in to_dict(spec).items() if key not in PROCESSES}
    return {"run": run, "method": to_dict(config)}


def read_config(folder: Path) -> dict[str, Any]:
    """The tables `run` and `method` of the run in `folder`; its method and dataset are registered."""
    from clipcil.data.dataset import datasets
    from clipcil.methods.registry import methods

    path = folder / "config.toml"
    if not path.is_file():
        raise UserError(f"{folder} holds no run (there is no config.toml in it)")
    table = read_toml(path)
    for part in ("run", "method"):
        if not isinstance(table.get(part), dict):
            raise UserError(f"{path} is damaged: it has no table [{part}]; put the right one back or start a new run")
    for key, called, known in (("data", "dataset", datasets()), ("method", "method", methods())):
        if isinstance(name := table["run"].get(key), str) and name not in known:
            word = "FILE.py" if key == "method" else "--data FILE.py"
            how = "in Python, make the same Experiment again and call run(folder), which continues"
            if table["run"].get("code"):
                how = f"in a file, name it again: clipcil run {word} --resume {quoted(folder)}"
            raise UserError(
                f"{folder} is a run of the {called} '{name}', which is not installed here; where it was given {how}"
            )
    return table


def read_tables(path: Path) -> dict[str, dict[str, Any]]:
    """The tables `run` and `method` of a TOML file of the user's own; each may be missing."""
    table = {"run": {}, "method": {}} | read_toml(path, links=True)
    for key, value in table.items():
        if key not in ("run", "method") or not isinstance(value, dict):
            raise UserError(f"{path} has '{key}' outside of its tables; it may have [run] and [method]")
    known = [each.name for each in fields(RunSpec)]
    if unknown := [key for key in table["run"] if key not in known]:
        raise UserError(f"{path}: there is no option '{unknown[0]}'{nearest(unknown[0], known)}")
    return table


def over(kept: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are `given` over those of a file; the number of tasks and the increment replace each other."""
    other = {"tasks": "increment", "increment": "tasks"}
    return merge({key: value for key, value in kept.items() if other.get(key) not in given}, given)


def check_same(folder: Path, found: dict[str, Any], asked: dict[str, Any]) -> None:
    """Refuse to continue a run with other options than it was begun with."""
    if difference := first_difference(found, asked):
        raise UserError(f"{folder} holds another run ({difference}); name another folder with --out")


def first_difference(found: dict[str, Any], asked: dict[str, Any], where: str = "") -> str:
    """The first entry in which two tables differ, as a phrase for a message; empty where they agree."""
    for key in sorted({*found, *asked}, key=lambda key: (key != "run", key)):  # the method's name before its settings
        a, b, place = found.get(key), asked.get(key), f"{where}{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            if inner := first_difference(a, b, f"{place}."):
                return inner
            continue
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b) > 3 and a != b:
            index = next(i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1])
            a, b, place = a[index], b[index], f"{place}[{index}]"
        if json.dumps(a) != json.dumps(b):
            a, b = (text if len(text := str(value)) <= 80 else f"{text[:80]}…" for value in (a, b))
            return f"its {place} is {a}, not {b}"
    return ""

"""The task loop: learn a task, measure on all classes seen, keep a checkpoint, until the stream ends."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from clipcil.clip import CLIP, load_clip
from clipcil.data.broken import drop_broken
from clipcil.data.dataset import Dataset, full_options, open_dataset
from clipcil.data.orders import class_order
from clipcil.data.reader import Reader
from clipcil.data.stream import TaskStream, task_sizes
from clipcil.errors import UserError
from clipcil.experiment.checkpoint import CheckpointFolder, SnapshotFolder, run_mark, sweep_run
from clipcil.experiment.display import Display
from clipcil.experiment.drift import copy_memory, measure_drift
from clipcil.experiment.evaluate import Record, evaluate
from clipcil.experiment.monitor import RunMonitor
from clipcil.experiment.results import Outcome, check_start, identity, write_outcome, write_start
from clipcil.experiment.spec import RunSpec, as_table
from clipcil.files import cache_folder, run_lock
from clipcil.methods.base import Method
from clipcil.methods.registry import find_method
from clipcil.training.loop import Session

HEADER = ("task", "classes", "A_k", "weighted", "newest", "first", "seconds")


@dataclass
class Shared:
    """What runs in one process can share: loaded backbones, datasets, and features of towers that nobody moved."""

    clips: dict[str, CLIP] = field(default_factory=dict)
    datasets: dict[tuple[str, str, str, bool], tuple[Dataset, list[str]]] = field(default_factory=dict)
    readers: dict[str, Reader] = field(default_factory=dict)


@dataclass
class Setting:
    """A run made ready: everything loaded, nothing learnt."""

    spec: RunSpec
    method: Method
    stream: TaskStream
    reader: Reader
    notes: list[str] = field(default_factory=list)
    """What a person should know about the pictures: those left out, lists read in part."""


def make_fabric(device: str, precision: str, devices: int = 1) -> Any:
    """Lightning Fabric carries device and precision; one CPU process in float32 unless told otherwise."""
    import warnings

    from lightning_fabric import Fabric

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fabric = Fabric(accelerator=device, devices=devices, precision=precision)
        except (ValueError, RuntimeError, TypeError) as error:
            raise UserError(f"device '{device}' with precision '{precision}': {str(error).splitlines()[0]}") from error
    fabric.launch()
    return fabric


def make_ready(spec: RunSpec, config: Any, session: Session, shared: Shared | None = None) -> Setting:
    """Load the backbone and the data, cut the stream, build the method."""
    shared = shared or Shared()
    kind = find_method(spec.method)
    if spec.backbone not in shared.clips:
        shared.clips[spec.backbone] = load_clip(spec.backbone).to(session.device)
    clip = shared.clips[spec.backbone]
    dataset, notes = _find_dataset(spec, shared)
    if spec.shots is not None:
        dataset = dataset.shrink(spec.shots, spec.seed)
    if kind.tunes_tower:
        clip = own_tower(clip)
        reader = Reader(clip, cache_folder(), session.device)
    else:
        reader = shared.readers.setdefault(spec.backbone, Reader(clip, cache_folder(), session.device, shared=True))
    order = class_order(spec.order, dataset.classes)
    sizes = task_sizes(len(dataset.classes), spec.tasks, spec.increment, spec.base)
    stream = TaskStream(dataset, reader, order, sizes)
    torch.manual_seed(spec.seed)
    method = kind(config, clip, session, dataset.templates).to(session.device)
    return Setting(spec, method, stream, reader, notes)


def _find_dataset(spec: RunSpec, shared: Shared) -> tuple[Dataset, list[str]]:
    """The dataset, opened once for all runs that share, and what there is to say about it."""
    options = full_options(spec.data, spec.data_options)
    place = (spec.data, str(spec.data_root), str(sorted(options.items())), spec.skip_broken)
    if place not in shared.datasets:
        dataset = open_dataset(spec.data, spec.data_root, options)
        broken: list[str] = []
        if spec.skip_broken:
            dataset, broken = drop_broken(dataset)
        shared.datasets[place] = (dataset, [*dataset.notes, *(f"left out: {line}" for line in broken)])
    return shared.datasets[place]


def own_tower(clip: CLIP) -> CLIP:
    """A CLIP whose vision tower is a copy that may be tuned; the text tower is shared."""
    own = copy.copy(clip)
    own._modules = dict(clip._modules)
    own.vision = copy.deepcopy(clip.vision)
    return own


def run(
    spec: RunSpec,
    config: Any,
    out: Path,
    display: Display | None = None,
    resume: bool = False,
    shared: Shared | None = None,
) -> Outcome:
    """Learn the whole stream and write the results to the folder `out`, which no other process may be writing to."""
    with run_lock(out):
        return _run(spec, config, out, display or Display(), resume, shared)


def _run(spec: RunSpec, config: Any, out: Path, display: Display, resume: bool, shared: Shared | None) -> Outcome:
    table = as_table(spec, config)
    snapshots = SnapshotFolder(out / "checkpoint", display.tell)
    check_start(out, table, resume)
    sweep_run(out)
    monitor = RunMonitor(out / "steps.jsonl", display, snapshots)
    session = Session(make_fabric(spec.device, spec.precision), monitor)
    with monitor.phase("loading"):
        setting = make_ready(spec, config, session, shared)
    method, stream = setting.method, setting.stream
    belongs = identity(spec, table, method.clip, stream)
    checkpoints, snapshots.mark = CheckpointFolder(out / "checkpoint", belongs), run_mark(belongs)
    loaded = checkpoints.newest(display.tell) if resume else None
    snapshots.clear(keep=loaded.tasks if loaded else 0 if resume else None)
    write_start(out, table)  # only now: a run that could not begin has claimed nothing
    for note in setting.notes:
        display.tell(note)
    setting.reader.on_progress = display.progress
    records: list[Record] = []
    drifts: list[dict[str, float] | None] = []
    if loaded is not None:
        checkpoints.restore(loaded, method)
        records = [Record(**record) for record in loaded.facts["records"]]
        drifts = loaded.facts["drift"]
        monitor.log_size = loaded.facts["log_size"]
        monitor.seconds = loaded.facts["seconds"]
        display.tell(f"going on after task {loaded.tasks} of {len(stream)}")
    display.start(_title(spec, stream, method), len(stream))
    try:
        for task in stream.tasks(len(records)):
            started = time.perf_counter()
            monitor.task = task.index
            before = copy_memory(method)
            with monitor.phase("learning"):
                method.learn(task)
            with monitor.phase("evaluation"):
                records.append(evaluate(method, stream, task.index))
            with monitor.phase("drift"):
                drifts.append(measure_drift(before, method, stream, task.index) if before is not None else None)
            facts = {"records": [record.as_dict() for record in records], "drift": drifts}
            facts |= {"log_size": monitor.log_size, "seconds": monitor.seconds}
            checkpoints.save(task.index + 1, method, facts)
            snapshots.clear()
            display.row(_row(records, stream, time.perf_counter() - started), HEADER)
        monitor.cut_log()
        outcome = Outcome(table, stream.names, stream.sizes, records, drifts, method.notes())
        write_outcome(out, outcome, setting.stream, monitor)
        return outcome
    finally:
        display.stop()


def _title(spec: RunSpec, stream: TaskStream, method: Method) -> str:
    what = f"{len(stream.names)} classes in {len(stream)} tasks"
    return f"{method.title} on {spec.data}: {what}, backbone {spec.backbone}, seed {spec.seed}"


def _row(records: list[Record], stream: TaskStream, seconds: float) -> list[str]:
    metrics = Outcome({}, stream.names, stream.sizes, records, [], []).metrics
    numbers = (metrics.after[-1], metrics.after_weighted[-1], metrics.matrix[-1, -1], metrics.matrix[-1, 0])
    seen = sum(stream.sizes[: len(records)])
    return [f"{len(records)}/{len(stream)}", str(seen), *(f"{number:.2f}" for number in numbers), f"{seconds:.1f}"]

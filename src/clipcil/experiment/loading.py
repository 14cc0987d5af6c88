"""Loading the parts of an experiment: backbone, data, the stream of tasks and the learner."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clipcil.clip import CLIP, load_clip
from clipcil.data.broken import drop_broken
from clipcil.data.dataset import Dataset, open_dataset
from clipcil.data.orders import class_order
from clipcil.data.reader import Reader
from clipcil.data.stream import TaskStream, task_sizes
from clipcil.errors import UserError
from clipcil.experiment.learner import Learner
from clipcil.experiment.spec import TASKS, RunSpec
from clipcil.files import cache_folder
from clipcil.methods.base import Method
from clipcil.run_cache import RunCache
from clipcil.training.loop import Session


@dataclass
class Shared:
    """What experiments in one process can share: backbones, datasets, and features of towers that are not tuned."""

    backbones: dict[str, CLIP] = field(default_factory=dict)
    missing: dict[str, UserError] = field(default_factory=dict)
    """Backbones that could not be loaded, and why: a grid of runs asks the hub for each once, not once for each run."""
    datasets: dict[str, tuple[Dataset, list[str]]] = field(default_factory=dict)
    readers: dict[str, Reader] = field(default_factory=dict)
    run_cache: RunCache | None = None
    """Where trained stages, and the features of the towers they trained, are kept for runs that differ only in what
    comes after them."""
    alone: bool = False
    """Of one experiment: the features of a task's training pictures are dropped when it ends."""


@dataclass(frozen=True)
class Source:
    """Where the data and the backbone of one experiment come from, as far as its options do not say it."""

    data_root: Path | None
    """Where the dataset is today. The options of a run that is continued say where it was when the run began."""
    dataset: Dataset | None = None
    """An open dataset, taken instead of the one that the options name."""
    backbone: CLIP | None = None
    """A loaded backbone, taken instead of the one that the options name."""
    named_by_user: bool = True
    """Whether the user named the backbone, not the folder of a run that is continued: only then is it downloaded."""


@dataclass
class Parts:
    """What an experiment consists of once it is loaded."""

    learner: Learner
    stream: TaskStream
    reader: Reader
    notes: list[str]
    """What a person should know about the pictures: those left out, lists read in part."""


def load_parts(
    spec: RunSpec, config: Any, kind: type[Method], session: Session, shared: Shared, source: Source
) -> Parts:
    """Load what `spec` names, from where `source` says."""
    clip = _backbone(spec.backbone, shared) if source.backbone is None else source.backbone
    learner = Learner(kind, config, clip, session, spec.seed)
    dataset, notes = _open(spec, shared, source)
    if spec.hold_out is not None:
        dataset = dataset.hold_out(spec.hold_out, spec.seed)
    if spec.shots is not None:
        dataset = dataset.shrink(spec.shots, spec.seed)
    method = learner.build(dataset.templates)
    method.check_names(dataset.classes)
    reader = _reader(method, spec.backbone, session, shared)
    order = class_order(spec.order, dataset.classes)
    tasks = None if spec.tasks == TASKS else spec.tasks  # the default adapts to fewer classes
    stream = TaskStream(dataset, reader, order, task_sizes(len(order), tasks, spec.increment, spec.base))
    return Parts(learner, stream, reader, notes)


def _backbone(name: str, shared: Shared) -> CLIP:
    """The backbone, loaded once for all experiments that share."""
    if name in shared.missing:
        raise shared.missing[name]
    if name not in shared.backbones:
        try:
            shared.backbones[name] = load_clip(name)
        except UserError as error:
            shared.missing[name] = error
            raise
    return shared.backbones[name]


def _reader(method: Method, backbone: str, session: Session, shared: Shared) -> Reader:
    """A reader of its own for a method that tunes its tower; otherwise the one for all experiments that share."""
    clip = method.clip
    if method.tunes_tower:
        return Reader(clip, cache_folder(), session.device, run_cache=session.run_cache)
    reader = shared.readers.get(backbone)
    if reader is None or reader.clip is not clip or reader.device != session.device:  # another one of the same name
        reader = shared.readers[backbone] = Reader(clip, cache_folder(), session.device, shared=not shared.alone)
    reader.make_room()
    return reader


def _open(spec: RunSpec, shared: Shared, source: Source) -> tuple[Dataset, list[str]]:
    """The dataset, opened once for all experiments that share, and what there is to say about it."""
    if source.dataset is not None:
        return _with_notes(source.dataset, spec.skip_broken)
    place = repr((spec.data, source.data_root, sorted(spec.data_options.items()), spec.skip_broken))
    if place not in shared.datasets:
        opened = open_dataset(spec.data, source.data_root, spec.data_options)
        shared.datasets[place] = _with_notes(opened, spec.skip_broken)
    return shared.datasets[place]


def _with_notes(dataset: Dataset, skip_broken: bool) -> tuple[Dataset, list[str]]:
    """The dataset, without broken pictures where these are skipped, and what there is to say about it."""
    broken: list[str] = []
    if skip_broken:
        dataset, broken = drop_broken(dataset)
    return dataset, [*dataset.notes, *(f"left out: {line}" for line in broken)]

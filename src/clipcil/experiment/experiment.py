"""An experiment: a method learns a dataset task by task and is evaluated after each task."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipcil.clip import CLIP
from clipcil.clip.loading import backbone_name
from clipcil.data.dataset import Dataset
from clipcil.data.stream import Task, TaskStream
from clipcil.distributed import barrier, from_first, name_lost_processes, rank
from clipcil.errors import UserError
from clipcil.experiment.checkpoint import CheckpointFolder, Loaded, SnapshotFolder, run_mark, sweep_run
from clipcil.experiment.device import find_device, make_fabric, usual_torch
from clipcil.experiment.display import Display
from clipcil.experiment.drift import copy_memory, measure_drift
from clipcil.experiment.evaluate import Record, evaluate
from clipcil.experiment.folder import (
    check_installed,
    check_same,
    check_start,
    inputs,
    read_config,
    write_inputs,
    write_results,
    write_start,
)
from clipcil.experiment.loading import Parts, Shared, load_parts
from clipcil.experiment.monitor import RunMonitor
from clipcil.experiment.notebook import default_display
from clipcil.experiment.results import Results
from clipcil.experiment.spec import PROCESSES, RunSpec, as_table, method_settings, resolved, split_options
from clipcil.files import run_lock, sha256
from clipcil.memory.gaussians import GaussianMemory
from clipcil.methods.base import Method
from clipcil.methods.registry import check_method, find_method
from clipcil.network import on_behalf_of_a_folder
from clipcil.reading import Count, typed
from clipcil.settings import build, merge, nested, to_dict
from clipcil.training.loop import Session
from clipcil.training.own_random import OwnState

HEADER = ("task", "classes", "A_k", "weighted", "newest", "first", "seconds")


class Experiment:
    """A method, a dataset and a backbone: learn task by task, evaluate after each, or run it all into a folder.

    Nothing is loaded before the first task is asked for. A task that was not evaluated is evaluated before the next one
    is learnt, so that the accuracy matrix is always complete.

    Args:
        method: Name of a method (`clipcil.methods()`), or a class of your own derived from `clipcil.Method`.
        data: Name of a dataset (`clipcil.datasets()`), a folder of class/picture, or a `clipcil.Dataset`.
        backbone: "mini", a Hugging Face id, a folder, a file, or what `clipcil.load_clip` returned.
        preset: Start from the published values kept for this method and dataset.
        settings: Settings of the method as a mapping, for names that are also options of the experiment.
        shared: What several experiments in this process share.
        **options: Options of `RunSpec` (tasks, increment, base, order, seed, shots, hold_out, test_sample,
            data_root, data_options, skip_broken, device, precision, devices, nodes), and settings of the method:
            `beta=0.2`, `**{"stage1.lr": 1e-5}`.

    Raises:
        UserError: A name or value is wrong; the message says which and what would fit.

    Example:
        >>> import clipcil
        >>> experiment = clipcil.Experiment("simplecil", data="emoji", tasks=20, seed=0)
        >>> for task in experiment:
        ...     experiment.learn(task)
        ...     accuracy = experiment.evaluate().last
        ...     if task.index == 2:
        ...         break
        >>> len(experiment.results.after), round(experiment.results.average) > 50
        (3, True)
        >>> clipcil.Experiment("dmc-ot", betta=0.2)
        Traceback (most recent call last):
        clipcil.errors.UserError: there is no option or setting 'betta'; did you mean 'beta'?
    """

    def __init__(
        self,
        method: str | type[Method] = "dmc-ot",
        data: str | Path | Dataset = "emoji",
        *,
        backbone: str | Path | CLIP = "mini",
        preset: bool = True,
        settings: Mapping[str, Any] | None = None,
        shared: Shared | None = None,
        **options: Any,
    ) -> None:
        kind = find_method(method) if isinstance(method, str) else check_method(method)
        choices, own = split_options(options, kind)
        if not isinstance(data, str | Path | Dataset):
            raise UserError(f"data is of type {type(data).__name__}; give a name, a folder or a clipcil.Dataset")
        choices |= {"method": kind.name, "data": data.name if isinstance(data, Dataset) else str(data)}
        choices |= {"backbone": backbone_name(backbone)}
        spec = build(RunSpec, choices)
        if isinstance(data, Dataset):
            if spec.data_options or spec.data_root:
                raise UserError("data_root and data_options are for datasets by name; this dataset is open already")
            spec = replace(spec, device=find_device(spec.device))
        else:
            spec = resolved(replace(spec, data="folder", data_root=data) if isinstance(data, Path) else spec)
        settings = {} if settings is None else settings
        if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
            raise UserError("settings must be a mapping, such as {'beta': 0.2}")
        config = method_settings(spec, merge(nested(settings), nested(own)), preset, kind)
        objects = (data if isinstance(data, Dataset) else None, backbone if isinstance(backbone, CLIP) else None)
        self._set_up(spec, config, kind, shared, *objects)

    @classmethod
    def of(cls, spec: RunSpec, config: Any, shared: Shared | None = None) -> Experiment:
        """The experiment with these options and this config of its method."""
        experiment = cls.__new__(cls)
        experiment._set_up(resolved(spec), config, find_method(spec.method), shared)
        return experiment

    @classmethod
    def resume(cls, folder: str | Path, given: Mapping[str, Any] | None = None) -> Experiment:
        """The experiment whose run is in `folder`, to be continued with `run(folder)`.

        Args:
            folder: A folder that `run` has written to.
            given: Options of `RunSpec`, and `settings` of the method, that must be those of the run; only `data_root`
                may be another: where the same pictures are today.

        A run of a dataset or method that was given as an object is continued by `run(folder)` of an experiment that is
        made again with the same object.

        Raises:
            UserError: The folder holds no run, or something in `given` is not what the run was begun with.
        """
        kept, given = read_config(Path(folder)), dict(given or {})
        check_installed(Path(folder), kept["run"])
        settings = given.pop("settings", {})
        other = {"tasks": "increment", "increment": "tasks"}  # the one given replaces the other one kept
        run = {key: value for key, value in kept["run"].items() if other.get(key) not in given}
        spec = resolved(build(RunSpec, merge(run, given)))
        place = spec.data_root
        spec = replace(spec, data_root=build(RunSpec, run).data_root)  # of the place the pictures count, not its name
        compared = given.keys() - {*PROCESSES, "data_root"}
        before, now = ({key: table.get(key) for key in compared} for table in (kept["run"], to_dict(spec)))
        check_same(Path(folder), {"run": before}, {"run": now})  # first: the settings of another method do not fit
        experiment = cls.of(spec, method_settings(spec, merge(kept["method"], settings), preset=False))
        check_same(Path(folder), kept, experiment.table)
        experiment._named = "backbone" in given
        experiment._place = place
        return experiment

    def _set_up(
        self,
        spec: RunSpec,
        config: Any,
        kind: type[Method],
        shared: Shared | None,
        dataset: Dataset | None = None,
        backbone: CLIP | None = None,
    ) -> None:
        self.spec, self.config = spec, config
        self._place = spec.data_root  # where the data is read from
        self._kind, self._shared = kind, shared or Shared(alone=True)
        self._dataset, self._backbone = dataset, backbone  # where they were given as objects
        self._records: list[Record] = []
        self._drift: list[dict[str, float] | None] = []
        self._before: GaussianMemory | None = None
        self._unfinished: int | None = None  # a task whose learning was interrupted
        self._task: Task | None = None  # the one handed out last
        self._random = OwnState()
        self._in_folder = False  # whether `run` has begun
        self._loaded: Parts | None = None
        self._fabric: Any = None
        self._named = True  # whether what is loaded was named by the user, not by a folder

    @property
    def table(self) -> dict[str, Any]:
        """Every option and setting, as `config.toml` holds them."""
        return as_table(self.spec, self.config)

    @property
    def method(self) -> Method:
        """The method, as far as it has learnt."""
        return self._ready().learner.method

    @property
    def stream(self) -> TaskStream:
        """The tasks: class names in their order, sizes, test pictures."""
        return self._ready().stream

    @property
    def results(self) -> Results:
        """Accuracies after every task learnt so far."""
        return self._results() if self._unfinished is not None and self._records else self.evaluate()

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self.stream)

    def __iter__(self) -> Iterator[Task]:
        """The tasks that are not learnt yet. A task's pictures cannot be read once the next task is asked for."""
        self._check_whole()
        # Kept: a task ends with the iterator it came from.
        self._tasks = self._hand_out(self.stream.tasks(len(self.method.sizes)))
        return self._tasks

    def _hand_out(self, tasks: Iterator[Task]) -> Iterator[Task]:
        for task in tasks:
            self._task = task
            yield task

    def __repr__(self) -> str:
        what = f"{self._kind.title} on {self.spec.data}"
        if self._loaded is not None:
            stream = self._loaded.stream
            what += f": {len(stream.names)} classes in {len(stream)} tasks"
        return f"{what}, backbone {self.spec.backbone}, seed {self.spec.seed}, device {self.spec.device}"

    def learn(self, task: Task) -> None:
        """Learn the classes of `task`.

        Args:
            task: The next task, from iterating over the experiment.

        Raises:
            UserError: It is not the next task, or it has ended, or it is of another experiment.
        """
        learner, monitor = self._ready().learner, self._monitor
        self._check_whole()
        learner.check(task)
        if self._task is None or not task.pictures.of_one_task(self._task.pictures):
            raise UserError("this task is of another experiment; learn the tasks that iterating over this one gives")
        if learner.method.sizes:
            self.evaluate()
        monitor.task = task.index
        self._before = copy_memory(learner.method)
        self._unfinished = task.index
        with monitor.phase("learning"), usual_torch(learner.session.device), self._random.active():
            learner.learn(task)
        self._unfinished = None

    def evaluate(self) -> Results:
        """Evaluate on the test pictures of every class seen, unless that is done already.

        Returns:
            The results after all tasks so far; `last` is the accuracy now.

        Raises:
            UserError: Nothing is learnt yet, or learning was interrupted.
        """
        method, stream, monitor = self.method, self.stream, self._monitor
        self._check_whole()
        newest = len(method.sizes) - 1
        if newest < 0:
            raise UserError("no task is learnt yet; learn one before evaluating")
        if len(self._records) <= newest:
            with monitor.phase("evaluation"), usual_torch(method.device):
                record = evaluate(method, stream, newest, self.spec.test_sample)
            with monitor.phase("drift"), usual_torch(method.device):
                before = self._before
                drift = measure_drift(before, method, stream, newest) if before is not None else None
            self._records.append(record)  # both or, where one was interrupted, neither
            self._drift.append(drift)
        return self._results()

    def _results(self) -> Results:
        held_out = f"measured on {self.spec.hold_out} held-out training pictures per class, not on the test pictures"
        stream, notes = self.stream, [*self.method.notes(), *([held_out] if self.spec.hold_out else [])]
        return Results(self.table, stream.names, stream.sizes, list(self._records), list(self._drift), notes)

    def run(self, folder: str | Path, *, display: Display | None = None, resume: bool = True) -> Results:
        """Learn and evaluate every task, writing results and checkpoints to `folder`.

        Killed or interrupted at any moment, the same call continues from the last checkpoint and ends with the same
        results.

        Args:
            folder: Where the run is kept; no other process may be writing to it.
            display: What is shown of its progress. Default: a bar in a notebook, nothing elsewhere.
            resume: Whether a run in `folder` may be continued; otherwise it is refused.

        Raises:
            UserError: The folder holds something else, or training diverged.
        """
        folder, display = Path(folder), display or default_display()
        if self._loaded is not None and not self._in_folder:
            raise UserError("this experiment has begun outside a run folder; make a new Experiment for run()")
        self._in_folder, self._unfinished, self._loaded = True, None, None  # the folder says how far it is
        self._records, self._drift = [], []
        self.launch()
        if rank() > 0:
            return self._follow()
        with run_lock(folder), name_lost_processes(folder):
            return self._lead(folder, display, resume)

    def launch(self) -> None:
        """Start the other processes of a run on several devices, and wait for them. Nothing with one device."""
        if self._fabric is None:
            spec = self.spec
            self._fabric = make_fabric(spec.device, spec.precision, spec.devices, spec.nodes)

    def _lead(self, folder: Path, display: Display, resume: bool) -> Results:
        """The run in its first process, which alone reads and writes the folder."""
        snapshots = SnapshotFolder(folder / "checkpoint", display.tell)
        check_start(folder, self.table, resume)
        sweep_run(folder)
        ready = self._ready(RunMonitor(folder / "steps.jsonl", display, snapshots))
        belongs = self._identity()
        checkpoints, snapshots.mark = CheckpointFolder(folder / "checkpoint", belongs), run_mark(belongs)
        kept = checkpoints.newest(display.tell) if resume else None
        snapshots.clear(keep=kept.tasks if kept else 0 if resume else None)
        made_from = inputs(self.table)
        # Only now: a run that could not begin has claimed nothing.
        for note in (*write_start(folder, self.table, self.method.clip, made_from), *ready.notes):
            display.tell(note)
        kept = from_first(kept)
        if kept is not None:
            self._restore(kept)
            display.tell(f"going on after task {kept.tasks} of {len(self)}")
        display.start(repr(self), len(self))
        try:
            for task in self:
                started = time.perf_counter()
                self.learn(task)
                results = self.evaluate()
                with self._random.active():  # it is saved, too
                    checkpoints.save(task.index + 1, self.method, self._facts())
                snapshots.clear()
                display.row(_row(results, time.perf_counter() - started), HEADER)
            self._monitor.cut_log()
            write_results(folder, self.results, ready.stream, self._monitor)
            write_inputs(folder, made_from, restored=kept is not None)
            barrier()
            return self.results
        finally:
            display.stop()

    def _follow(self) -> Results:
        """The run in the other processes: the same computations, and no file."""
        self._ready()
        nothing: Loaded | None = None
        if (kept := from_first(nothing)) is not None:
            self._restore(kept)
        for task in self:
            self.learn(task)
            self.evaluate()
        barrier()
        return self.results

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint holds beside the method."""
        monitor = self._monitor
        facts = {"records": [dataclasses.asdict(record) for record in self._records], "drift": self._drift}
        return {**facts, "log_size": monitor.log_size, "seconds": monitor.seconds}

    def _restore(self, kept: Loaded) -> None:
        with usual_torch(self.method.device), self._random.active():
            CheckpointFolder.restore(kept, self.method)
        facts: _Kept = typed(kept.facts, _Kept)
        if not len(facts.records) == len(facts.drift) == kept.tasks:
            raise UserError(f"the checkpoint after task {kept.tasks} has {len(facts.records)} records; start anew")
        self._records, self._drift = facts.records, facts.drift
        monitor = self._monitor
        monitor.log_size, monitor.seconds = facts.log_size, facts.seconds

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint belongs to: every choice, and the very weights, pictures and class order they led to."""
        clip, data = self.method.clip, self.stream.dataset
        return {
            "method": f"{self._kind.__module__}.{self._kind.__qualname__}",
            "backbone": clip.fingerprint,
            "preprocessing": clip.preprocess.fingerprint,
            "dataset": {"name": self.spec.data, "train": data.train.key, "test": data.test.key},
            "labels": [hashlib.sha256(part.labels.numpy().tobytes()).hexdigest() for part in (data.train, data.test)],
            "templates": list(data.templates),
            "files": {key: sha256(path) for key, path in vars(self.config).items() if isinstance(path, Path)},
            "classes": self.stream.names,
            "sizes": self.stream.sizes,
            "config": self.table,
        }

    def _check_whole(self) -> None:
        if self._unfinished is not None:
            raise UserError(
                f"learning task {self._unfinished + 1} was interrupted, so the method is in no state to go on;"
                " make a new Experiment, or use run(folder), which continues"
            )

    def _ready(self, monitor: RunMonitor | None = None) -> Parts:
        """Backbone, data, tasks and method, loaded when first needed."""
        if self._loaded is None:
            monitor = monitor or RunMonitor(None, default_display(), None)
            self.launch()
            ours = self._kind.__module__.startswith("clipcil.")  # a cached stage is found by our code, not by others'
            session = Session(self._fabric, monitor, self._shared.run_cache if ours else None)
            with (
                monitor.phase("loading"),
                on_behalf_of_a_folder(self._named),
                usual_torch(session.device),
                self._random.active(),
            ):
                spec, given = replace(self.spec, data_root=self._place), (self._dataset, self._backbone)
                self._loaded = load_parts(spec, self.config, self._kind, session, self._shared, *given)
            self._loaded.reader.on_progress = monitor.display.progress
            self._monitor = monitor
        return self._loaded


@dataclass
class _Kept:
    """What a checkpoint holds beside the method, as `_facts` wrote it."""

    records: list[Record]
    drift: list[dict[str, float] | None]
    log_size: Count
    seconds: dict[str, float]


def _row(results: Results, seconds: float) -> list[str]:
    count, metrics = len(results.records), results.metrics
    numbers = (metrics.after[-1], metrics.after_weighted[-1], metrics.matrix[-1, -1], metrics.matrix[-1, 0])
    seen = sum(results.sizes[:count])
    return [f"{count}/{len(results.sizes)}", str(seen), *(f"{number:.2f}" for number in numbers), f"{seconds:.1f}"]

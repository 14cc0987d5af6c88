"""An experiment: a method learns a dataset task by task and is evaluated after each task."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from clipcil.clip import CLIP, load_clip
from clipcil.clip.loading import backbone_name
from clipcil.data.dataset import Dataset, drop_broken, named_dataset, open_dataset
from clipcil.data.reader import Reader
from clipcil.data.tasks import Task, TaskStream, class_order, task_sizes
from clipcil.errors import UserError, nearest
from clipcil.experiment.evaluate import Record, copy_memory, evaluate, measure_drift
from clipcil.experiment.monitor import Display, Timer, default_display
from clipcil.experiment.results import Results
from clipcil.experiment.spec import (
    RunSpec,
    as_table,
    check_same,
    files_of,
    method_settings,
    over,
    placed,
    read_config,
    resolved,
)
from clipcil.memory.gaussians import GaussianMemory
from clipcil.methods.base import Method, build_method
from clipcil.methods.registry import find_method, method_class, named_method
from clipcil.network import on_behalf_of_a_folder
from clipcil.settings import build, merge, nested
from clipcil.storage import cache_folder
from clipcil.tensor_store import TensorStore
from clipcil.training.device import make_fabric, usual_torch
from clipcil.training.own_random import OwnState
from clipcil.training.trainer import Callback, Trainer


@dataclass
class LoadCache:
    """Backbones, datasets and features of frozen towers that experiments in one process share."""

    backbones: dict[str, CLIP | UserError] = field(default_factory=dict)
    """Loaded backbones, or why one could not be loaded: a grid asks the hub once for each, not once for each run."""
    datasets: dict[str, tuple[Dataset, list[str]]] = field(default_factory=dict)
    readers: dict[str, Reader] = field(default_factory=dict)
    stages: TensorStore | None = None
    """Trained stages, and features of the towers they trained, for runs that differ only in later stages."""


class Experiment:
    """A method, a dataset and a backbone: learn task by task, evaluate after each, or run it all into a folder.

    Nothing is loaded before the first task is asked for. A task that was not evaluated is evaluated before the next one
    is learnt, so that the accuracy matrix is always complete.

    Args:
        method: Name of a method (`clipcil.methods()`), or one of your own: a class derived from `clipcil.Method`, or a
            file with one, such as `mine.py` or `mine.py:Means`.
        data: Name of a dataset (`clipcil.datasets()`), a folder of class/picture, a `clipcil.Dataset`, or a file that
            registers one, such as `shapes.py`.
        backbone: "mini", a Hugging Face id, a folder, a file, or a `CLIP` from `clipcil.load_clip`.
        preset: Start from the published values kept for this method and dataset.
        settings: Settings of the method as a mapping, for names that are also options of the experiment; or a whole
            config of the method.
        cache: Backbones, datasets and features that several experiments in this process share.
        **options: Options of `RunSpec` (tasks, increment, base, order, seed, shots, hold_out, test_sample,
            data_root, data_options, skip_broken, device, precision, devices, nodes), and settings of the method:
            `beta=0.2`, `**{"stage1.lr": 1e-5}`.

    Raises:
        UserError: A name or value is wrong; the message names it and the nearest one.

    Examples:
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

    records: list[Record]
    """The counts of each evaluation."""
    drift: list[dict[str, float] | None]
    """Drift of the stored Gaussians after each task."""

    def __init__(
        self,
        method: str | type[Method] = "dmc-ot",
        data: str | Path | Dataset = "emoji",
        *,
        backbone: str | Path | CLIP = "mini",
        preset: bool = True,
        settings: Mapping[str, Any] | object | None = None,
        cache: LoadCache | None = None,
        **options: Any,
    ) -> None:
        self._kind = kind = named_method(method) if isinstance(method, str) else method_class(method)
        if not isinstance(data, str | Path | Dataset):
            raise UserError(f"data is of type {type(data).__name__}; give a name, a folder or a clipcil.Dataset")
        known, settable = ([item.name for item in fields(each)] for each in (RunSpec, kind.Config))
        for key in options:
            if key.partition(".")[0] not in (*known, *settable):
                raise UserError(f"there is no option or setting '{key}'{nearest(key, [*settable, *known])}")
        choices = {key: value for key, value in options.items() if key in known and value is not None}
        own = {key: value for key, value in options.items() if key not in known}
        choices |= {"method": kind.name, "data": data.name if isinstance(data, Dataset) else named_dataset(str(data))}
        spec = build(RunSpec, {**choices, "backbone": backbone_name(backbone)})
        if not isinstance(data, Dataset):
            if isinstance(data, Path) and data.suffix != ".py":
                spec = replace(spec, data="folder", data_root=data)
            self.spec = resolved(spec, kind)
        elif spec.data_options or spec.data_root:
            raise UserError("data_root and data_options are for datasets by name; this dataset is open already")
        else:
            self.spec = replace(placed(spec), code=files_of(kind))
        settings = {} if settings is None else settings
        if isinstance(settings, kind.Config) and not own:
            self.config: Any = settings
        elif isinstance(settings, Mapping) and all(isinstance(key, str) for key in settings):
            self.config = method_settings(self.spec, merge(nested(settings), nested(own)), preset, kind)
        else:
            raise UserError("settings must be a mapping, such as {'beta': 0.2}")
        self.data_root = self.spec.data_root
        """Where the dataset is now; `spec.data_root` of a run that is continued says where it was at its start."""
        self._data, self._backbone = data, backbone
        self._named_by_user = True  # whether the user named the backbone; one that only a folder names is not fetched
        self._cache, self._alone = cache or LoadCache(), cache is None
        self._fabric: Any = None
        self.reset()

    @classmethod
    def of(cls, spec: RunSpec, config: Any, cache: LoadCache | None = None) -> Self:
        """The experiment with these options and this config of its method."""
        return cls(settings=config, cache=cache, **vars(spec))

    @classmethod
    def resume(cls, folder: str | Path, given: Mapping[str, Any] | None = None) -> Self:
        """The experiment whose run is in `folder`, to be continued with `run(folder)`.

        Args:
            folder: A folder that `run` has written to.
            given: Options of `RunSpec`, and `settings` of the method, that must be those of the run; only `data_root`
                may be another: where the same pictures are now.

        A run of a dataset or method that was given as an object is continued by `run(folder)` of an experiment that is
        made again with the same object.

        Raises:
            UserError: The folder holds no run, or something in `given` is not an option that the run began with.
        """
        folder, options = Path(folder), dict(given or {})
        if "method" in options:
            options["method"] = named_method(options["method"]).name
        if "data" in options:
            options["data"] = named_dataset(options["data"])
        settings, kept = options.pop("settings", {}), read_config(folder)
        begun, spec = build(RunSpec, kept["run"]), resolved(build(RunSpec, over(kept["run"], options)))
        data_root, spec = spec.data_root, replace(spec, data_root=begun.data_root)  # where pictures are is not compared
        kind = find_method(begun.method)  # another method is refused by the comparison, not by its settings
        config = method_settings(spec, merge(kept["method"], settings), preset=False, kind=kind)
        check_same(folder, kept, as_table(spec, config))
        experiment = cls.of(spec, config)
        experiment.data_root, experiment._named_by_user = data_root, "backbone" in options
        return experiment

    def reset(
        self, display: Display | None = None, callbacks: tuple[Callback, ...] = (), stages: TensorStore | None = None
    ) -> None:
        """Forget what was loaded and learnt; the next task is the first.

        Args:
            display: Shows the progress. Default: a bar in a notebook, nothing elsewhere.
            callbacks: Receivers of progress beside the display and the timer.
            stages: Store of trained stages of a run that can be resumed inside a task.
        """
        self.display, self.timer = display or default_display(), Timer()
        self.mark = ""
        """Names the run in its store of stages."""
        self.notes: list[str] = []
        """Remarks about the pictures: those left out, lists read in part."""
        self.records, self.drift = [], []
        self.random = OwnState()
        self._callbacks, self._stages = (self.display, self.timer, *callbacks), stages
        self._method: Method | None = None
        self._newest: Task | None = None  # handed out by the iterator
        self._interrupted: int | None = None  # index of a task whose learning did not end
        self._memory_before: GaussianMemory | None = None  # of the method before the task learnt last

    @property
    def table(self) -> dict[str, Any]:
        """Every option and setting, as `config.toml` holds them."""
        return as_table(self.spec, self.config)

    @property
    def loaded(self) -> bool:
        """Whether backbone, data and method are loaded."""
        return self._method is not None

    @property
    def method(self) -> Method:
        """The method, as far as it has learnt."""
        if self._method is None:
            self._method = self._load()
        return self._method

    @property
    def stream(self) -> TaskStream:
        """The tasks: class names in their order, sizes, test pictures."""
        _ = self.method
        return self._stream

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self.stream)

    def __iter__(self) -> Iterator[Task]:
        """The tasks that are not learnt yet. A task's pictures cannot be read once the next task is asked for."""
        self._check_uninterrupted()

        def hand_out() -> Iterator[Task]:
            for task in self.stream.tasks(len(self.method.sizes)):
                self._newest = task
                yield task

        self._tasks = hand_out()  # in an attribute, because its tasks end when the iterator is deleted
        return self._tasks

    def __repr__(self) -> str:
        spec = self.spec
        tasks = f": {len(self._stream.names)} classes in {len(self._stream)} tasks" if self.loaded else ""
        chosen = f"backbone {spec.backbone}, seed {spec.seed}, device {spec.device}"
        return f"{self._kind.title} on {spec.data}{tasks}, {chosen}"

    def learn(self, task: Task) -> None:
        """Learn the classes of `task`.

        Args:
            task: The next task, from iterating over the experiment.

        Raises:
            UserError: It is not the next task, or it has ended, or it is of another experiment.
        """
        self._check_uninterrupted()
        method, learnt = self.method, len(self.method.sizes)
        if task.index != learnt:
            raise UserError(f"task {task.index + 1} is not the next one: {learnt} tasks are learnt")
        task.pictures.check()
        if self._newest is None or not task.pictures.of_one_task(self._newest.pictures):
            raise UserError("this task is of another experiment; learn the tasks that iterating over this one gives")
        if method.sizes:
            self.evaluate()
        method.trainer.begin_task(f"{self.mark}-{task.index:04d}")
        self._memory_before = copy_memory(method)
        self._interrupted = task.index
        with self._computing("learning"), self.random.active():
            method.learn(task)
        self._interrupted = None

    def evaluate(self) -> Results:
        """Evaluate on the test pictures of every class seen, unless that is done already.

        Returns:
            The results after all tasks so far; `last` is the accuracy now.

        Raises:
            UserError: Nothing is learnt yet, or learning was interrupted.
        """
        self._check_uninterrupted()
        method, newest = self.method, len(self.method.sizes) - 1
        if newest < 0:
            raise UserError("no task is learnt yet; learn one before evaluating")
        if len(self.records) <= newest:
            with self._computing("evaluation"):
                record = evaluate(method, self.stream, newest, self.spec.test_sample)
            with self._computing("drift"):
                before = self._memory_before
                drift = measure_drift(before, method, self.stream, newest) if before is not None else None
            self.records.append(record)  # both or, where one was interrupted, neither
            self.drift.append(drift)
        return self.results_after()

    @property
    def results(self) -> Results:
        """Results after every task learnt so far; where learning was interrupted, after those before."""
        return self.results_after() if self._interrupted is not None and self.records else self.evaluate()

    def run(
        self,
        folder: str | Path,
        *,
        display: Display | None = None,
        resume: bool = True,
        callbacks: Sequence[Callback] = (),
    ) -> Results:
        """Learn and evaluate every task, writing results and checkpoints to `folder`; see `experiment.run.run`."""
        from clipcil.experiment.run import run

        return run(self, Path(folder), display, resume, callbacks)

    def launch(self) -> None:
        """Start the other processes of a run on several devices, and wait for them. Nothing with one device."""
        if self._fabric is None:
            spec = self.spec
            self._fabric = make_fabric(spec.device, spec.precision, spec.devices, spec.nodes)

    @contextmanager
    def _computing(self, phase: str) -> Iterator[None]:
        with self.method.trainer.phase(phase), usual_torch(self.method.device):
            yield

    def results_after(self, tasks: int | None = None) -> Results:
        """The results after so many tasks, or after all that are measured."""
        notes = self.method.notes()
        if count := self.spec.hold_out:
            notes = [*notes, f"measured on {count} held-out training pictures per class, not on the test pictures"]
        stream = self.stream
        return Results(self.table, stream.names, stream.sizes, self.records[:tasks], self.drift[:tasks], notes)

    def _check_uninterrupted(self) -> None:
        if self._interrupted is not None:
            raise UserError(
                f"learning task {self._interrupted + 1} was interrupted, so its state is incomplete;"
                " make a new Experiment, or use run(folder), which continues"
            )

    def _load(self) -> Method:
        """Load the backbone and the data, and build the stream of tasks and the method."""
        self.launch()
        spec = self.spec
        # The key of a cached stage covers the code of this package, not that of somebody else's method.
        stages = self._cache.stages if self._kind.__module__.startswith("clipcil.") else None
        trainer = Trainer(self._fabric, self._callbacks, self._stages, stages)
        with (
            trainer.phase("loading"),
            on_behalf_of_a_folder(self._named_by_user),
            usual_torch(trainer.device),
            self.random.active(),
        ):
            given = self._backbone if isinstance(self._backbone, CLIP) else None
            owned = given is None and self._alone
            clip = given or (load_clip(spec.backbone) if owned else self._open_backbone())
            dataset, self.notes = self._open_dataset()
            if spec.hold_out is not None:
                dataset = dataset.hold_out(spec.hold_out, spec.seed)
            if spec.shots is not None:
                dataset = dataset.shrink(spec.shots, spec.seed)
            method = build_method(self._kind, self.config, clip, trainer, spec.seed, dataset.templates, owned=owned)
            method.check_names(dataset.classes)
            reader = self._open_reader(method)
            order = class_order(spec.order, dataset.classes)
            sizes = task_sizes(len(order), spec.tasks, spec.increment, spec.base)
            self._stream = TaskStream(dataset, reader, order, sizes, joint=self._kind.bound == "upper")
        reader.on_progress = self.display.progress
        return method

    def _open_backbone(self) -> CLIP:
        """The backbone, loaded once for all experiments that share the cache."""
        loaded, name = self._cache.backbones, self.spec.backbone
        if name not in loaded:
            try:
                loaded[name] = load_clip(name)
            except UserError as error:
                loaded[name] = error
        if isinstance(found := loaded[name], UserError):
            raise found
        return found

    def _open_dataset(self) -> tuple[Dataset, list[str]]:
        """The dataset, opened once for all experiments that share the cache, and remarks about its pictures."""
        spec, given, where = self.spec, self._data, (self.spec.data, self.data_root, self.spec.data_options)
        opened = {} if isinstance(given, Dataset) else self._cache.datasets
        key = repr((where, spec.skip_broken))
        if key not in opened:
            dataset = given if isinstance(given, Dataset) else open_dataset(*where)
            dataset, broken = drop_broken(dataset) if spec.skip_broken else (dataset, [])
            opened[key] = dataset, [*dataset.notes, *(f"left out: {line}" for line in broken)]
        return opened[key]

    def _open_reader(self, method: Method) -> Reader:
        """A reader of its own for a method that tunes its tower; otherwise one for all experiments that share."""
        clip, device, readers = method.clip, method.device, self._cache.readers
        half = device.type == "cpu" and self.spec.precision == "bf16-mixed"
        if method.tunes_tower:
            return Reader(clip, cache_folder(), device, store=method.trainer.cache, half=half)
        reader, shared = readers.get(self.spec.backbone), not self._alone
        if reader is None or (reader.clip, reader.device, reader.half) != (clip, device, half):  # of the same name
            reader = Reader(clip, cache_folder(), device, shared, TensorStore.of_user(), half)
            readers[self.spec.backbone] = reader
        reader.make_room()
        return reader

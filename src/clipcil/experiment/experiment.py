"""An experiment: a method learns a dataset task by task and is evaluated after each task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clipcil.clip import CLIP
from clipcil.clip.loading import backbone_name
from clipcil.data.dataset import Dataset
from clipcil.data.stream import Task, TaskStream
from clipcil.errors import UserError
from clipcil.experiment.device import find_device, make_fabric, usual_torch
from clipcil.experiment.display import Display
from clipcil.experiment.loading import Shared, Source, load_parts
from clipcil.experiment.monitor import RunMonitor
from clipcil.experiment.notebook import default_display
from clipcil.experiment.results import Results
from clipcil.experiment.resumable import options_of_run, run_into
from clipcil.experiment.spec import RunSpec, as_table, method_settings, resolved, split_options
from clipcil.experiment.task_loop import TaskLoop, title_of
from clipcil.methods.base import Method
from clipcil.methods.registry import check_method, find_method
from clipcil.network import on_behalf_of_a_folder
from clipcil.settings import build, merge, nested
from clipcil.training.loop import Session
from clipcil.training.own_random import OwnState


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
        dataset, clip = data if isinstance(data, Dataset) else None, backbone if isinstance(backbone, CLIP) else None
        self._set_up(spec, config, kind, shared, Source(spec.data_root, dataset, clip))

    @classmethod
    def of(cls, spec: RunSpec, config: Any, shared: Shared | None = None) -> Experiment:
        """The experiment with these options and this config of its method."""
        spec = resolved(spec)
        return cls._made(spec, config, shared, Source(spec.data_root))

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
        given = given or {}
        spec, config, data_root = options_of_run(Path(folder), given)
        return cls._made(spec, config, None, Source(data_root, named_by_user="backbone" in given))

    @classmethod
    def _made(cls, spec: RunSpec, config: Any, shared: Shared | None, source: Source) -> Experiment:
        experiment = cls.__new__(cls)
        experiment._set_up(spec, config, find_method(spec.method), shared, source)
        return experiment

    def _set_up(self, spec: RunSpec, config: Any, kind: type[Method], shared: Shared | None, source: Source) -> None:
        self.spec, self.config = spec, config
        self._kind, self._source = kind, source
        self._shared = shared or Shared(alone=True)
        self._fabric: Any = None
        self._loop: TaskLoop | None = None

    @property
    def table(self) -> dict[str, Any]:
        """Every option and setting, as `config.toml` holds them."""
        return as_table(self.spec, self.config)

    @property
    def method(self) -> Method:
        """The method, as far as it has learnt."""
        return self._begun().method

    @property
    def stream(self) -> TaskStream:
        """The tasks: class names in their order, sizes, test pictures."""
        return self._begun().stream

    @property
    def results(self) -> Results:
        """Accuracies after every task learnt so far."""
        return self._begun().results

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self.stream)

    def __iter__(self) -> Iterator[Task]:
        """The tasks that are not learnt yet. A task's pictures cannot be read once the next task is asked for."""
        return iter(self._begun())

    def __repr__(self) -> str:
        return title_of(self.spec, self._kind, self._loop.stream if self._loop is not None else None)

    def learn(self, task: Task) -> None:
        """Learn the classes of `task`.

        Args:
            task: The next task, from iterating over the experiment.

        Raises:
            UserError: It is not the next task, or it has ended, or it is of another experiment.
        """
        self._begun().learn(task)

    def evaluate(self) -> Results:
        """Evaluate on the test pictures of every class seen, unless that is done already.

        Returns:
            The results after all tasks so far; `last` is the accuracy now.

        Raises:
            UserError: Nothing is learnt yet, or learning was interrupted.
        """
        return self._begun().evaluate()

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
        place = Path(folder)
        if self._loop is not None and self._loop.folder is None:
            raise UserError("this experiment has begun outside a run folder; make a new Experiment for run()")
        self._loop = None  # the folder says how far it is

        def load(monitor: RunMonitor) -> TaskLoop:
            self._loop = self._load(monitor, place)
            return self._loop

        self.launch()
        return run_into(place, self.table, load, display or default_display(), resume)

    def launch(self) -> None:
        """Start the other processes of a run on several devices, and wait for them. Nothing with one device."""
        if self._fabric is None:
            spec = self.spec
            self._fabric = make_fabric(spec.device, spec.precision, spec.devices, spec.nodes)

    def _begun(self) -> TaskLoop:
        """The task loop; backbone, data and method are loaded when it is first needed."""
        if self._loop is None:
            self._loop = self._load(RunMonitor(None, default_display(), None), None)
        return self._loop

    def _load(self, monitor: RunMonitor, folder: Path | None) -> TaskLoop:
        self.launch()
        # The key of a cached stage covers the code of this package, not that of somebody else's method.
        run_cache = self._shared.run_cache if self._kind.__module__.startswith("clipcil.") else None
        session = Session(self._fabric, monitor, run_cache)
        random = OwnState()
        with (
            monitor.phase("loading"),
            on_behalf_of_a_folder(self._source.named_by_user),
            usual_torch(session.device),
            random.active(),
        ):
            parts = load_parts(self.spec, self.config, self._kind, session, self._shared, self._source)
        parts.reader.on_progress = monitor.display.progress
        return TaskLoop(self.spec, self.config, parts, monitor, random, folder)

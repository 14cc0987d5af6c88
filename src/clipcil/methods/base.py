"""The base class of methods. A method learns tasks and scores pictures; growing and checkpointing are done here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from clipcil.clip import CLIP
from clipcil.data.reader import Batch
from clipcil.data.tasks import Task
from clipcil.errors import UserError, first_line
from clipcil.settings import options
from clipcil.training.trainer import Trainer

LARGEST_TENSOR = 2**24
"""Numbers in the largest tensor of a forward pass at test: 64 MB."""
TEMPLATES = ("a photo of a {}.",)


@options
class NoConfig:
    """The config of a method without options."""


class Method(nn.Module, ABC):
    """A class-incremental method on CLIP.

    A subclass implements `build` (its modules), `learn_task` (how a task is learnt) and `logits` (how pictures are
    scored); where something other than a buffer grows with the classes, it also implements `allocate`.

    A checkpoint is `state_dict()` plus `names` and `sizes`. Everything that grows is a growing buffer or is created in
    `allocate`, so that loading can call `grow` for each task and then fill in the values. `clip` is not a submodule: a
    frozen backbone is not part of a checkpoint. A method that fine-tunes the tower sets `tunes_tower`, is given its own
    copy of the tower, and registers it as a module in `build`.

    Example:
        >>> import torch, clipcil
        >>> from torch.nn.functional import normalize
        >>> class Means(clipcil.Method):
        ...     '''The nearest class mean.'''
        ...     name, title, scores = "means", "Class means", "cosine"
        ...     def build(self):
        ...         self.growing_buffer("means", self.dim)
        ...     def learn_task(self, task):
        ...         for label in self.new_labels:
        ...             self.means[label] = task.pictures.features[task.pictures.labels == label].mean(0)
        ...     def logits(self, batch):
        ...         return normalize(batch.features, dim=-1) @ normalize(self.means, dim=-1).T
        >>> experiment = clipcil.Experiment(Means, data="emoji", tasks=10)
        >>> experiment.learn(next(iter(experiment)))
        >>> experiment.evaluate().last > 50
        True
    """

    name: ClassVar[str]
    """Its name on the command line."""
    title: ClassVar[str]
    """Its name in tables."""
    Config: ClassVar[type] = NoConfig
    """A frozen dataclass of its options."""
    presets: ClassVar[str] = ""
    """Name of the method whose presets it uses, for a variant of another method; empty: its own."""
    scores: ClassVar[Literal["logits", "cosine"]] = "logits"
    """Whether `logits` returns logits for a softmax, or cosines that have to be divided by a temperature first."""
    keeps: ClassVar[str] = "nothing"
    """What it keeps of old classes, in a few words, for tables."""
    keeps_exemplars: ClassVar[bool] = False
    """Whether it keeps old training pictures or their features."""
    tunes_tower: ClassVar[bool] = False
    """Whether it fine-tunes the vision tower."""

    def __init__(self, config: Any, clip: CLIP, trainer: Trainer, templates: Sequence[str] = TEMPLATES) -> None:
        """Build the method without any class.

        Args:
            config: An instance of `Config`.
            clip: The backbone; a method that tunes the tower must be given its own copy.
            trainer: Training context: device, precision, callbacks.
            templates: Sentences about a class, `{}` standing for its name.
        """
        super().__init__()
        self.config = config
        self._outside = (clip, trainer)  # in a tuple, so that nn.Module does not register them as submodules
        self.templates = tuple(templates)
        self.names: list[str] = []
        self.sizes: list[int] = []
        self._growing: list[str] = []
        self.build()

    # Implemented by a method.

    def build(self) -> None:
        """Create modules, parameters and growing buffers."""

    def allocate(self, names: Sequence[str]) -> None:
        """Create what a new task with classes `names` needs besides growing buffers; `self.names` has them already."""

    def check_names(self, names: Sequence[str]) -> None:
        """Refuse class names that are too long for the prompts. An experiment calls it with all its names before the
        first task, so that a long name is not refused only when its task comes. Methods without texts do nothing."""

    @abstractmethod
    def learn_task(self, task: Task) -> None:
        """Learn the classes of `task`. Growing buffers have their new rows already; the module is in training mode."""

    @abstractmethod
    def logits(self, batch: Batch) -> Tensor:
        """Scores (B, classes seen so far): logits or cosines, see `scores`. A row depends on its own picture only."""

    def learn_again(self, task: Task) -> None:
        """Learn more pictures of known classes; the labels of `task` are their indices in `names`. Few methods can."""
        raise UserError(f"{self.title} cannot learn more pictures of a class it knows; {_who_can('learn_again')} can")

    def forget(self, index: int) -> None:
        """Remove class `index`; the labels of the classes after it move down by one. Few methods can."""
        raise UserError(f"{self.title} cannot forget a class; {_who_can('forget')} can")

    def novelty(self, batch: Batch) -> Tensor | None:
        """(B,): novelty score, higher for pictures less like any known class; None if there is no such score.

        Only the order of the scores matters: the caller chooses the threshold.
        """
        return None

    def notes(self) -> list[str]:
        """Remarks for reports, such as a part of the method that was left out."""
        return []

    # Implemented here.

    @property
    def clip(self) -> CLIP:
        """The backbone."""
        return self._outside[0]

    @property
    def trainer(self) -> Trainer:
        """The training context: device, precision and callbacks."""
        return self._outside[1]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.trainer.device

    @property
    def dim(self) -> int:
        """Dimension of CLIP's joint space."""
        return self.clip.config.dim

    @property
    def score_scale(self) -> float:
        """Factor of `logits` before a softmax: CLIP's own scale for cosines, 1 for logits."""
        return float(self.clip.scale) if self.scores == "cosine" else 1.0

    @property
    def seen(self) -> int:
        """Number of classes seen."""
        return len(self.names)

    @property
    def old(self) -> int:
        """Number of classes seen before the newest task."""
        return self.seen - self.sizes[-1] if self.sizes else 0

    @property
    def new_labels(self) -> range:
        """Labels of the newest task."""
        return range(self.old, self.seen)

    def learn(self, task: Task) -> None:
        """Learn a task: grow and `learn_task` for new classes, `learn_again` for a task without new classes."""
        if task.names:
            self.grow(task.names)
        self.train()
        if task.names:
            self.learn_task(task)
        else:
            self.learn_again(task)
        self.eval()
        self.lay_out()

    def lay_out(self) -> None:
        """Make every buffer contiguous, as loading a checkpoint does; called after `learn`, `learn_again` and `forget`.

        Products with a transposed matrix are rounded differently on some CPUs, so that a method that was saved and
        loaded would differ in its last bits from one that was not.

        Raises:
            UserError: A value of the state is not finite. The training loop checks losses and parameters; what is
                computed from them after the last step is checked only here.
        """
        for key, value in self.state_dict().items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise UserError(f"training diverged: '{key}' holds a NaN or an infinity; try a lower learning rate")
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.contiguous())

    def grow(self, names: Sequence[str]) -> None:
        """Add a new task with classes `names` and its buffer rows. Called by `learn`, and when loading."""
        self.names += list(names)
        self.sizes.append(len(names))
        for name in self._growing:
            value: Tensor = getattr(self, name)
            setattr(self, name, torch.cat([value, value.new_zeros(len(names), *value.shape[1:])]))
        self.allocate(names)

    def growing_buffer(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> None:
        """Register a buffer (classes seen, *shape) that gets a row of zeros for each new class."""
        self.register_buffer(name, torch.zeros(0, *shape, dtype=dtype, device=self.device))
        self._growing.append(name)

    def drop_class(self, index: int) -> tuple[int, int]:
        """Remove class `index` from names, sizes and growing buffers; returns (its task, its index within the task).

        A task that loses its last class is removed too, so that loading never calls `grow` without a class.
        """
        task, place = 0, index
        while place >= self.sizes[task]:
            place -= self.sizes[task]
            task += 1
        del self.names[index]
        self.sizes[task] -= 1
        if not self.sizes[task]:
            del self.sizes[task]
        for name in self._growing:
            value: Tensor = getattr(self, name)
            setattr(self, name, torch.cat([value[:index], value[index + 1 :]]))
        return task, place


def build_method(
    kind: type[Method],
    config: Any,
    clip: CLIP,
    trainer: Trainer,
    seed: int,
    templates: Sequence[str] = TEMPLATES,
    state: tuple[dict[str, Tensor], dict[str, Any]] | None = None,
) -> Method:
    """A method on its backbone, ready to learn. Every run and every lesson builds its method here.

    Args:
        kind: Class of the method.
        config: An instance of its `Config`.
        clip: The backbone. A method that tunes the vision tower gets a copy of the tower.
        trainer: Training context.
        seed: Seed of the random state in which the method is built.
        templates: Sentences about a class.
        state: What `method_state` returned; None: a method without any class.
    """
    clip = clip.to(trainer.device)
    clip = clip.with_own_vision_tower() if kind.tunes_tower else clip
    torch.manual_seed(seed)
    method = kind(config, clip, trainer, templates).to(trainer.device)
    if state is not None:
        restore_method(method, *state)
    return method.eval()


def method_state(method: Method) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything of a method that a checkpoint holds: tensors, and the names and sizes that shape them."""
    return dict(method.state_dict()), {"names": method.names, "sizes": method.sizes}


def restore_method(method: Method, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Restore a method without any class: call `grow` for every task, then load the values.

    Raises:
        UserError: The state does not fit the method.
    """
    try:
        names, sizes = [str(name) for name in facts["names"]], [int(size) for size in facts["sizes"]]
        if sum(sizes) != len(names) or min(sizes, default=1) < 1:
            raise ValueError(f"{len(names)} names for {sum(sizes)} classes")
        start = 0
        for size in sizes:
            method.grow(names[start : start + size])
            start += size
        method.load_state_dict(tensors)
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the checkpoint does not fit {method.name}: {first_line(error)}") from error
    if method.tunes_tower:
        method.clip.touch()


def _who_can(hook: str) -> str:
    """Names of the methods that implement `hook`."""
    kinds, found = [Method], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        # A class without a name is a common base class of methods, not a method.
        if hasattr(kind, "name") and getattr(kind, hook) is not getattr(Method, hook):
            found.add(kind.name)
    return ", ".join(sorted(found)) or "no method"

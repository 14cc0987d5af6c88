"""The base class of methods. A method learns tasks and scores pictures; growing and checkpointing are done here."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clipcil.clip import CLIP
from clipcil.data.reader import Batch
from clipcil.data.tasks import Task
from clipcil.errors import UserError, first_line
from clipcil.limits import MOST_NEW_NUMBERS
from clipcil.memory.rows import without
from clipcil.settings import options
from clipcil.training.trainer import Trainer

LARGEST_TENSOR = 2**24
"""Numbers in the largest tensor of a forward pass at test: 64 MB."""
MAKERS = ("zeros", "ones", "full", "empty", "rand", "randn")
"""Functions of torch that make a tensor of given sizes."""
TEMPLATES = ("a photo of a {}.",)


@options
class NoConfig:
    """The config of a method without options."""


class Method(nn.Module, ABC):
    """A class-incremental method on CLIP.

    A subclass implements `build` (its modules), `learn_task` (how a task is learnt) and `logits` (how pictures are
    scored). The other hooks are optional.

    A checkpoint is `state_dict()` plus `names` and `sizes`. Everything that grows is a growing buffer or is created in
    `allocate`, so that loading can call `grow` for each task and then fill in the values. `clip` is not a submodule, so
    a frozen backbone is not part of a checkpoint. A method that fine-tunes the tower sets `tunes_tower`, is given its
    own copy of the tower, and registers it as a module in `build`.

    Examples:
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
    class_vectors: ClassVar[str] = ""
    """Name of its buffer (classes seen, dim) whose cosines with the features are the scores up to a constant factor;
    empty: it has none. An export writes these vectors."""

    clip: CLIP
    """The backbone."""
    trainer: Trainer
    """The training context: device, precision and callbacks."""

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
        self.__dict__["clip"] = clip  # past nn.Module, which would register it as a submodule
        self.trainer = trainer
        self.templates = tuple(templates)
        self.names: list[str] = []
        self.sizes: list[int] = []
        self._growing: list[str] = []
        self.build()

    # Every method implements these three.

    def build(self) -> None:
        """Create modules, parameters and growing buffers."""

    @abstractmethod
    def learn_task(self, task: Task) -> None:
        """Learn the classes of `task`. Growing buffers have their new rows already; the module is in training mode."""

    @abstractmethod
    def logits(self, batch: Batch) -> Tensor:
        """Scores (B, classes seen so far): logits or cosines, see `scores`. A row depends on its own picture only."""

    # A method may implement these.

    def allocate(self, names: Sequence[str]) -> None:
        """Create what a new task with classes `names` needs besides growing buffers; `self.names` has them already."""

    def check_names(self, names: Sequence[str]) -> None:
        """Refuse class names that are too long for the prompts. Called with all names before the first task."""

    def learn_again(self, task: Task) -> None:
        """Learn more pictures of known classes; the labels of `task` are their indices in `names`."""
        raise self.cannot("learn_again")

    def forget(self, index: int) -> None:
        """Remove class `index`; the labels of the classes after it move down by one."""
        raise self.cannot("forget")

    def novelty(self, batch: Batch) -> Tensor | None:
        """(B,): novelty score, higher for pictures less like any known class; None if there is no such score.

        Only the order of the scores matters: the caller chooses the threshold.
        """
        return None

    def leave_one_out(self, batch: Batch, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B, C) and novelty (B,) of pictures learnt as `labels` (B,), each by the method without it."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Remarks for reports, such as a part of the method that was left out."""
        return []

    @classmethod
    def implements(cls, hook: str) -> bool:
        """Whether the method implements an optional part, such as "forget"."""
        return getattr(cls, hook) is not getattr(Method, hook)

    @classmethod
    def cannot(cls, hook: Literal["learn_again", "forget"]) -> UserError:
        """The error of a method that does not implement `hook`; it names the methods that do."""
        from clipcil.methods.registry import methods

        what = {"learn_again": "learn more pictures of a class it knows", "forget": "forget a class"}[hook]
        able = ", ".join(name for name, kind in sorted(methods().items()) if kind.implements(hook))
        return UserError(f"{cls.title} cannot {what}; {able} can")

    # Every method has these.

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
        self.train()
        if task.names:
            self.grow(task.names)
            self.learn_task(task)
        else:
            self.learn_again(task)
        self.eval()
        self.lay_out()

    def lay_out(self) -> None:
        """Make every buffer contiguous, as loading does; called after `learn`, `learn_again` and `forget`.

        Some CPUs round products with a transposed matrix differently, so a method that was saved and loaded would
        differ in its last bits from one that was not.

        Raises:
            UserError: A value is NaN or infinite. Training checks its losses and parameters; this checks the rest.
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

    def growing_buffer(self, name: str, *shape: int, dtype: torch.dtype | None = None, persistent: bool = True) -> None:
        """Register a buffer (classes seen, *shape) that gets a row of zeros for each new class.

        A checkpoint leaves it out if it is not persistent: `allocate` computes it from the names.
        """
        self.register_buffer(name, torch.zeros(0, *shape, dtype=dtype, device=self.device), persistent)
        self._growing.append(name)

    def by_new_class(self, rows: Tensor, labels: Tensor) -> list[Tensor]:
        """The rows (n_c, ...) of each class of the newest task, from rows (N, ...) with labels (N,)."""
        return [rows[labels == label] for label in self.new_labels]

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
            setattr(self, name, without(getattr(self, name), index))
        return task, place


def build_method(
    kind: type[Method],
    config: Any,
    clip: CLIP,
    trainer: Trainer,
    seed: int,
    templates: Sequence[str] = TEMPLATES,
    state: tuple[dict[str, Tensor], dict[str, Any]] | None = None,
    *,
    owned: bool = False,
) -> Method:
    """A method on its backbone, ready to learn. Every run and every lesson builds its method here.

    Args:
        kind: Class of the method.
        config: An instance of its `Config`.
        clip: The backbone. A method that tunes the vision tower gets a copy of the tower, unless it is `owned`.
        trainer: Training context.
        seed: Seed of the random state in which the method is built.
        templates: Sentences about a class.
        state: What `method_state` returned; None: a method without any class.
        owned: Whether nobody else uses the backbone.
    """
    clip = clip.to(trainer.device)
    clip = clip.with_own_vision_tower() if kind.tunes_tower and not owned else clip
    torch.manual_seed(seed)
    if state is None:
        return kind(config, clip, trainer, templates).to(trainer.device).eval()
    with BoundedSizes(MOST_NEW_NUMBERS + 4 * sum(each.numel() for each in state[0].values())):
        method = kind(config, clip, trainer, templates).to(trainer.device)
        restore_method(method, *state)
    return method.eval()


class BoundedSizes(TorchFunctionMode):
    """Inside it tensors of at most `left` numbers can be made: their sizes come from settings in a stranger's file."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in MAKERS:
            sizes = args[0] if args and isinstance(args[0], list | tuple) else args
            self.left -= prod(size for size in sizes if isinstance(size, int))
            if self.left < 0:
                raise UserError("its settings ask for tensors far larger than those that it stores")
        return func(*args, **kwargs or {})


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
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            method.grow(names[end - size : end])
        method.load_state_dict(tensors)
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the checkpoint does not fit {method.name}: {first_line(error)}") from error
    if method.tunes_tower:
        method.clip.touch()

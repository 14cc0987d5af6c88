"""What every method is: it learns a task, and it scores pictures. Nothing else lives here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from clipcil.clip import CLIP
from clipcil.data.reader import Pictures
from clipcil.data.stream import Task
from clipcil.errors import UserError
from clipcil.training.loop import Session


class Method(nn.Module, ABC):
    """A class-incremental method on CLIP.

    A checkpoint is `state_dict()` plus `names` and `sizes`: parameters and buffers that grow with the classes are
    allocated in `grow` and nowhere else, so that loading can replay `grow` for each task and then fill in the values.
    `clip` is not a submodule: a frozen backbone is no part of a checkpoint. A method that tunes the tower says so in
    `tunes_tower`, is given a tower of its own, and registers it.
    """

    name: ClassVar[str]
    """What it is called on the command line."""
    title: ClassVar[str]
    """What it is called in a table."""
    Config: ClassVar[type]
    """A frozen dataclass of its options."""
    keeps_exemplars: ClassVar[bool] = False
    """Whether it keeps something of old training pictures."""
    tunes_tower: ClassVar[bool] = False
    """Whether it changes the vision tower."""

    def __init__(self, config: Any, clip: CLIP, session: Session) -> None:
        super().__init__()
        self.config = config
        self._outside = (clip, session)  # in a tuple, out of nn.Module's sight
        self.templates: tuple[str, ...] = ("a photo of a {}.",)  # sentences of the dataset; set by whoever builds it
        self.names: list[str] = []
        self.sizes: list[int] = []

    @property
    def clip(self) -> CLIP:
        return self._outside[0]

    @property
    def session(self) -> Session:
        return self._outside[1]

    @property
    def seen(self) -> int:
        """How many classes have been seen."""
        return len(self.names)

    def grow(self, names: Sequence[str]) -> None:
        """Make room for a new task of these classes. Extended by methods whose parameters grow."""
        self.names += list(names)
        self.sizes.append(len(names))

    @abstractmethod
    def learn(self, task: Task) -> None:
        """Learn the classes of `task`; begins with `self.grow(task.names)`."""

    @abstractmethod
    def logits(self, batch: Pictures) -> Tensor:
        """(B, classes seen so far). A row depends on its own picture alone."""

    def learn_again(self, task: Task) -> None:
        """More pictures of classes already seen; the labels of `task` are their places in `names`. Few methods can."""
        raise UserError(f"{self.title} cannot learn more pictures of a class it knows; {_who_can('learn_again')} can")

    def forget(self, index: int) -> None:
        """Lose class `index`; the labels of the classes after it move down by one. Few methods can."""
        raise UserError(f"{self.title} cannot forget a class; {_who_can('forget')} can")

    def drop_name(self, index: int) -> tuple[int, int]:
        """Take class `index` out of `names` and `sizes`; returns (its task, its place in the task).

        A task that loses its last class goes too, so that loading never replays `grow` for no class at all.
        """
        task, place = 0, index
        while place >= self.sizes[task]:
            place -= self.sizes[task]
            task += 1
        del self.names[index]
        self.sizes[task] -= 1
        if not self.sizes[task]:
            del self.sizes[task]
        return task, place

    def notes(self) -> list[str]:
        """What a report should say beside the numbers, such as a part that was left out."""
        return []


def _who_can(hook: str) -> str:
    """Names of the methods that have a `hook` of their own."""
    kinds, found = [Method], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if getattr(kind, hook) is not getattr(Method, hook):
            found.add(kind.name)
    return ", ".join(sorted(found)) or "no method"

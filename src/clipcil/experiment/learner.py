"""A method on its backbone, ready to learn: what `Experiment` and `Classifier` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clipcil.clip import CLIP
from clipcil.data.stream import Task
from clipcil.errors import UserError
from clipcil.experiment.checkpoint import restore_method
from clipcil.methods.base import Method
from clipcil.training.loop import Session


class Learner:
    """Builds a method and teaches it tasks. Every run and every lesson goes through here.

    Args:
        kind: Class of the method.
        config: Settings of the method.
        clip: The backbone. A method that tunes the vision tower is given a copy of it.
        session: Device, precision and monitor.
        seed: Seed of the random state in which the method is built.
    """

    method: Method
    """The method as far as it has learnt; there is none before `build`."""

    def __init__(self, kind: type[Method], config: Any, clip: CLIP, session: Session, seed: int) -> None:
        self.kind, self.config, self.session, self.seed = kind, config, session, seed
        self.clip = clip.to(session.device)

    def build(self, templates: Sequence[str], kept: tuple[dict[str, Tensor], dict[str, Any]] | None = None) -> Method:
        """A new method, seeded: without any class, or with the state that `method_state` returned."""
        clip = self.clip.with_own_vision_tower() if self.kind.tunes_tower else self.clip
        torch.manual_seed(self.seed)
        self.method = self.kind(self.config, clip, self.session, templates).to(self.session.device)
        if kept is not None:
            restore_method(self.method, *kept)
        self.method.eval()
        return self.method

    def check(self, task: Task) -> None:
        """Refuse a task that cannot be learnt now.

        Raises:
            UserError: It is not the next one, or it has ended.
        """
        learnt = len(self.method.sizes)
        if task.index != learnt:
            raise UserError(f"task {task.index + 1} is not the next one: {learnt} tasks are learnt")
        task.pictures.check()

    def learn(self, task: Task) -> None:
        """Learn a task of new classes.

        Raises:
            UserError: It is not the next task, or it has ended.
        """
        self.check(task)
        self.method.learn(task)

    def learn_again(self, task: Task) -> None:
        """Learn more pictures of known classes."""
        self.method.train()
        self.method.learn_again(task)
        self.method.eval()
        self.method.lay_out()

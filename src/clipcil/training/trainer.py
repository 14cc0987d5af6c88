"""The training loop that all methods share.

A stage that was trained before is restored instead of trained: from the folder of a run that was stopped, or from the
cache that runs share. For that to give the same bits, the loss may draw from torch's random state but must carry
nothing from one epoch to the next but the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from clipcil.data.reader import Pictures
from clipcil.distributed import average_gradients, from_first, rank, world_size
from clipcil.errors import UserError
from clipcil.settings import Share, options
from clipcil.tensor_store import Input, TensorStore, content_key
from clipcil.training.cpu import flushed_denormals
from clipcil.training.own_random import random_state, set_random_state

CHECK_EVERY = 50
"""Steps between checks of the loss for NaN: a check at every step would synchronise with a GPU."""


@options
class Training:
    """How one stage is trained.

    Example:
        >>> import clipcil
        >>> clipcil.Training(epochs=3, lr=1e-5).batch_size
        32
        >>> clipcil.Experiment("dmc-ot", stage1=clipcil.Training(epochs=1)).config.stage1.epochs
        1
    """

    epochs: Annotated[int, Field(ge=0, le=10**6)] = 5
    """Passes over the training pictures of the task."""
    steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Minimum number of steps: epochs are added until it is reached. A task of few pictures has few steps per epoch."""
    lr: NonNegativeFloat = 1e-3
    """Peak learning rate."""
    batch_size: Annotated[int, Field(ge=1, le=10**9)] = 32
    """Training pictures per step."""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    weight_decay: NonNegativeFloat = 1e-4
    momentum: Share = 0.9
    """Momentum; used by sgd only."""
    schedule: Literal["cosine", "cosine-epoch", "quarter-cosine", "constant", "multistep"] = "cosine"
    """cosine: towards 0 after the last step; cosine-epoch: the same curve, but lowered once an epoch (PROOF, ENGINE);
    quarter-cosine: cos(0.99 π/2 · e/(E − 1)) in epoch e of E (CODA-Prompt); multistep: ×0.1 after each milestone."""
    milestones: tuple[int, ...] = ()
    """Epochs after which multistep lowers the learning rate."""
    warmup: Share = 0.0
    """Share of the steps over which the learning rate rises from 0."""
    clip_norm: NonNegativeFloat = 0.0
    """Maximum gradient norm for clipping; 0 disables clipping."""

    def rate(self, step: int, steps: int) -> float:
        """Learning rate at `step` of `steps`, as a share of `lr`."""
        ramp = self.warmup * steps
        if step < ramp:
            return min(1.0, (step + 1) / ramp)
        epoch = step * self.epochs // max(1, steps)
        if self.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * (step - ramp) / max(1.0, steps - ramp)))
        if self.schedule == "cosine-epoch":
            return 0.5 * (1 + math.cos(math.pi * epoch / max(1, self.epochs)))
        if self.schedule == "quarter-cosine":
            return math.cos(0.99 * math.pi / 2 * epoch / max(1, self.epochs - 1))
        if self.schedule == "multistep":
            return float(0.1 ** sum(epoch >= milestone for milestone in self.milestones))
        return 1.0


class Callback:
    """Receives the progress of training. Every event does nothing here; a subclass overrides those it needs."""

    def begin_stage(self, stage: str, epochs: int, steps: int) -> None:
        """A stage of `epochs` epochs of `steps` steps each begins."""

    def step(self, stage: str, epoch: int, step: int, loss: Tensor, rate: float) -> None:
        """One step is done; `loss` is still on the device: reading it at once would synchronise with a GPU."""

    def end_stage(self, stage: str) -> None:
        """The stage is done."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """The block is part of phase `name`, such as "evaluation"."""
        return nullcontext()


class Trainer:
    """Training context of a method: device, precision, callbacks and stores of trained stages.

    Args:
        fabric: Lightning Fabric; None: the CPU in single precision.
        callbacks: Receivers of progress.
        stages: Store of the stages of one run, for resuming it inside a task.
        cache: Store of stages that several runs share.
    """

    def __init__(
        self,
        fabric: Any = None,
        callbacks: Sequence[Callback] = (),
        stages: TensorStore | None = None,
        cache: TensorStore | None = None,
    ) -> None:
        self.fabric, self.callbacks, self.stages, self.cache = fabric, list(callbacks), stages, cache
        self.device: torch.device = fabric.device if fabric is not None else torch.device("cpu")
        self._task, self._place = "", 0

    def begin_task(self, name: str) -> None:
        """Learning of a task begins; `name` tells its stages from those of all other tasks and runs."""
        self._task, self._place = name, 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is part of phase `name` for every callback."""
        with ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback.phase(name))
            yield

    def autocast(self) -> Any:
        """The context of mixed precision, where that is on."""
        return self.fabric.autocast() if self.fabric is not None else nullcontext()

    @property
    def _scaler(self) -> Any:
        """The gradient scaler of 16-mixed; None in other precisions."""
        scaler = getattr(self.fabric._precision, "scaler", None) if self.fabric is not None else None
        return scaler if scaler is not None and scaler.is_enabled() else None

    def fit(
        self,
        stage: str,
        parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
        data: int | Pictures,
        loss: Callable[..., Tensor],
        how: Training,
        each_epoch: Callable[[], None] | None = None,
        depends_on: Sequence[Input] | None = None,
    ) -> None:
        """Train parameters by minibatches.

        Args:
            stage: Name of the stage.
            parameters: The parameters to train, or groups of them, each with its own `lr`.
            data: Pictures, or a number of rows.
            loss: `loss(rows)` where `data` is a number, `loss(rows, batch)` where it is pictures. `rows` are the
                indices of a minibatch, (B,) int64 on the device; `batch` is `data[rows]`. Returns a 0-d tensor.
                Where several processes train together each computes the whole loss; passes through a tower are
                divided among them with `clipcil.distributed.spread`.
            how: Epochs, optimizer and learning rate.
            each_epoch: Called before every epoch, to draw what stays the same during it.
            depends_on: Everything that the loss depends on beside the parameters and the random state. Where it is
                given, the stage is shared with other runs through the cache.

        Raises:
            UserError: The loss or a parameter becomes NaN or infinite.
        """
        groups = _groups(parameters, how.lr)
        trained = [parameter for group in groups for parameter in group["params"]]
        count = data if isinstance(data, int) else len(data)
        steps = -(-count // how.batch_size)
        how = replace(how, epochs=max(how.epochs, -(-how.steps // max(1, steps))))
        for callback in self.callbacks:
            callback.begin_stage(stage, how.epochs, steps)
        keys = self._keys(stage, groups, count, how, depends_on)
        losses = self._restore(keys, stage, trained, how, steps)
        if losses is None:
            losses = self._train(stage, groups, data, loss, how, each_epoch)
        for parameter in trained:
            parameter.requires_grad_(False)
            parameter.grad = None
        if rank() == 0:
            kept = {f"parameter.{i}": parameter.detach() for i, parameter in enumerate(trained)} | random_state()
            for store, key in keys:
                if not store.paths(key):
                    with suppress(UserError):  # a full disk does not stop training; the checkpoint reports it
                        store.save(key, {**kept, "losses": losses})
        for callback in self.callbacks:
            callback.end_stage(stage)

    def _train(
        self,
        stage: str,
        groups: list[dict[str, Any]],
        data: int | Pictures,
        loss: Callable[..., Tensor],
        how: Training,
        each_epoch: Callable[[], None] | None,
    ) -> Tensor:
        """Train the groups and return the loss of every step, (epochs · steps,)."""
        trained = [parameter for group in groups for parameter in group["params"]]
        for parameter in trained:
            parameter.requires_grad_(True)
        optimizer = _optimizer(groups, how)
        if self._scaler is not None:  # every stage starts from the default scale
            self._scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
        count = data if isinstance(data, int) else len(data)
        steps = -(-count // how.batch_size)
        losses: list[Tensor] = []
        for epoch in range(how.epochs):
            if each_epoch is not None:
                each_epoch()
            check = LossCheck(stage, epoch, how)
            for step, rows in enumerate(torch.split(torch.randperm(count), how.batch_size)):
                rate = how.rate(epoch * steps + step, how.epochs * steps)
                for group, wanted in zip(optimizer.param_groups, groups, strict=True):
                    group["lr"] = wanted["lr"] * rate
                moved = rows.to(self.device, non_blocking=True)
                with flushed_denormals():
                    with self.autocast():
                        value = loss(moved) if isinstance(data, int) else loss(moved, data[rows])
                    self._update(value, trained, optimizer, how.clip_norm)
                losses.append(value.detach())
                check.add(losses[-1])
                for callback in self.callbacks:
                    callback.step(stage, epoch, step, losses[-1], how.lr * rate)
            check.finish(trained)
        return torch.stack(losses) if losses else torch.zeros(0)

    def _update(
        self, value: Tensor, trained: list[nn.Parameter], optimizer: torch.optim.Optimizer, clip_norm: float
    ) -> None:
        """One step of the optimizer. With 16-mixed the loss is scaled for the backward pass: gradients are scaled back
        before they are used, and a step at which one of them is infinite is left out and lowers the scale."""
        optimizer.zero_grad(set_to_none=True)
        scaler = self._scaler
        if self.fabric is None:
            value.backward()  # type: ignore[no-untyped-call]
        else:
            self.fabric.backward(value)
        average_gradients(trained)
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip_norm:
            nn.utils.clip_grad_norm_(trained, clip_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    def _keys(
        self,
        stage: str,
        groups: list[dict[str, Any]],
        count: int,
        how: Training,
        depends_on: Sequence[Input] | None,
    ) -> list[tuple[TensorStore, str]]:
        """The stores that may hold this stage, each with its key there."""
        self._place += 1
        keys = []
        if self.stages is not None:
            keys.append((self.stages, f"{self._task}-{self._place:02d}"))
        if self.cache is not None and depends_on is not None and self.device.type == "cpu" and world_size() == 1:
            precision = str(self.fabric._precision.precision) if self.fabric is not None else ""
            rates = [(len(group["params"]), group["lr"]) for group in groups]
            trained = [parameter for group in groups for parameter in group["params"]]
            words = (repr(how), repr((count, rates)), precision)
            keys.append((self.cache, content_key([*words, torch.get_rng_state(), *trained, *depends_on])))
        return keys if how.epochs else []

    def _restore(
        self,
        keys: Sequence[tuple[TensorStore, str]],
        stage: str,
        trained: list[nn.Parameter],
        how: Training,
        steps: int,
    ) -> Tensor | None:
        """Put a stage from a store in place of training it; callbacks see the same steps. Returns its losses."""
        found = next((tensors for store, key in keys if (tensors := store.load(key)) is not None), None)
        found = from_first(found)  # where several processes work on a run, the first alone reads and writes files
        if found is None:
            return None
        try:
            losses = found.pop("losses")
            with torch.no_grad():
                for index, parameter in enumerate(trained):
                    parameter.copy_(found[f"parameter.{index}"])
            set_random_state(found)
        except (RuntimeError, LookupError, TypeError) as error:
            raise UserError(f"the stage '{stage}' that is stored does not fit; delete checkpoint/stages") from error
        for place, loss in enumerate(losses):
            rate = how.lr * how.rate(place, how.epochs * steps)
            for callback in self.callbacks:
                callback.step(stage, place // steps, place % steps, loss, rate)
        return losses


class LossCheck:
    """Stops a stage whose loss or parameters become NaN or infinite.

    Losses are read in groups of `CHECK_EVERY`: reading each one would synchronise with a GPU at every step.
    """

    def __init__(self, stage: str, epoch: int, how: Training) -> None:
        self.stage, self.epoch, self.how = stage, epoch, how
        self.done = 0
        self.waiting: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        """The loss of one more step."""
        self.waiting.append(loss)
        if len(self.waiting) == CHECK_EVERY:
            self._read()

    def finish(self, parameters: Sequence[nn.Parameter]) -> None:
        """The end of an epoch: check before the stage is kept; no later loss would reveal a NaN."""
        self._read()
        if parameters and not bool(torch.stack([torch.isfinite(each).all() for each in parameters]).all()):
            self._fail(f"a parameter is NaN or infinite after epoch {self.epoch + 1}")

    def _read(self) -> None:
        if not self.waiting:
            return
        values = torch.stack([loss.float() for loss in self.waiting]).cpu()
        bad = torch.nonzero(~torch.isfinite(values)).flatten()
        if len(bad):
            step = self.done + int(bad[0])
            if self.epoch == 0 and step == 0:
                raise UserError(
                    f"training diverged before stage '{self.stage}': its first loss is {values[bad[0]]:g}, so its"
                    " inputs are not finite; try a lower learning rate for the stage before it"
                )
            self._fail(f"the loss is {values[bad[0]]:g} at epoch {self.epoch + 1}, step {step + 1}")
        self.done += len(self.waiting)
        self.waiting = []

    def _fail(self, what: str) -> None:
        raise UserError(
            f"training diverged: in stage '{self.stage}' {what} (learning rate {self.how.lr:g});"
            f" try a lower {self.stage}.lr, or {self.stage}.clip_norm=1"
        )


def _groups(parameters: Sequence[Any], lr: float) -> list[dict[str, Any]]:
    items = list(parameters)
    if items and isinstance(items[0], dict):
        return [{"params": list(group["params"]), "lr": group.get("lr", lr)} for group in items]
    return [{"params": items, "lr": lr}]


def _optimizer(groups: list[dict[str, Any]], how: Training) -> torch.optim.Optimizer:
    own = [dict(group) for group in groups]
    if how.optimizer == "sgd":
        return torch.optim.SGD(own, lr=how.lr, momentum=how.momentum, weight_decay=how.weight_decay)
    kind = torch.optim.AdamW if how.optimizer == "adamw" else torch.optim.Adam
    return kind(own, lr=how.lr, weight_decay=how.weight_decay)

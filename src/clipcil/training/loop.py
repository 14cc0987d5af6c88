"""The training loop all methods share, and what it tells those who watch.

A stage can be stopped after any epoch and taken up again: `learn` is simply called once more, and a stage that has a
snapshot is put back to where it was instead of trained. For that to give the same bits, the loss may draw from torch's
random state but must carry nothing from one epoch to the next but the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clipcil.errors import UserError
from clipcil.settings import within

CHECK_EVERY = 50
"""Steps between looks at the losses for a NaN: looking at every step would make a GPU wait."""


@dataclass(frozen=True)
class Training:
    """How one stage is trained."""

    epochs: int = 5
    """Passes over the training pictures of the task."""
    lr: float = 1e-3
    """Learning rate at its highest."""
    batch_size: int = 32
    """Training pictures per step."""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    weight_decay: float = 1e-4
    momentum: float = 0.9
    """For sgd alone."""
    schedule: Literal["cosine", "cosine-epoch", "quarter-cosine", "constant", "multistep"] = "cosine"
    """cosine: down to 0 at the last step; cosine-epoch: the same curve, but lowered once an epoch (PROOF, ENGINE);
    quarter-cosine: cos(0.99 π/2 · e/(E − 1)) in epoch e of E (CODA-Prompt); multistep: ×0.1 after each milestone."""
    milestones: tuple[int, ...] = ()
    """Epochs after which multistep lowers the learning rate."""
    warmup: float = 0.0
    """Share of the steps over which the learning rate rises from 0."""
    clip_norm: float = 0.0
    """Longest gradient allowed; 0: any."""

    def __post_init__(self) -> None:
        within("epochs", self.epochs, 0, 10**6)
        within("lr", self.lr, 0)
        within("batch_size", self.batch_size, 1, 10**9)
        within("weight_decay", self.weight_decay, 0)
        within("momentum", self.momentum, 0, 1)
        within("warmup", self.warmup, 0, 1)
        within("clip_norm", self.clip_norm, 0)

    def rate(self, step: int, steps: int) -> float:
        """Learning rate at `step` of `steps`, as a share of `lr`."""
        ramp = self.warmup * steps
        if step < ramp:
            return (step + 1) / ramp if ramp > 1 else 1.0
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


@dataclass
class Snapshot:
    """A stage after some epoch: everything needed to go on from there with the same bits."""

    epoch: int
    tensors: dict[str, Tensor]


class Monitor:
    """Hears how training goes and keeps snapshots. This one does neither; the engine's does both."""

    def begin(self, stage: str, epochs: int, steps: int) -> None:
        """A stage of `epochs` epochs of `steps` steps each begins."""

    def step(self, stage: str, epoch: int, step: int, loss: Tensor, rate: float) -> None:
        """One step is done; `loss` is still on the device: reading it at once would make a GPU wait."""

    def finish_epoch(self, stage: str, epoch: int, last: bool, snapshot: Callable[[], Snapshot]) -> None:
        """An epoch is done; `snapshot()` copies the stage as it is now."""

    def restore(self, stage: str) -> Snapshot | None:
        """The newest snapshot of `stage` in the task under way, if there is one."""
        return None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time spent inside is counted for `name`."""
        yield


class Session:
    """What a method needs around it in order to train: a device, a precision, somebody who watches."""

    def __init__(self, fabric: Any = None, monitor: Monitor | None = None) -> None:
        self.fabric = fabric
        self.monitor = monitor or Monitor()
        self.device: torch.device = fabric.device if fabric is not None else torch.device("cpu")

    def autocast(self) -> Any:
        return self.fabric.autocast() if self.fabric is not None else nullcontext()

    def fit(
        self,
        stage: str,
        parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
        count: int,
        loss: Callable[[Tensor], Tensor],
        how: Training,
        each_epoch: Callable[[], None] | None = None,
    ) -> None:
        """Train `parameters` (or groups of them, each with its `lr`) on rows 0…count−1.

        `loss(rows)` is given the rows of a batch as indices, (B,) int64 on the device, and returns a 0-d tensor.
        `each_epoch()` is called before every epoch, to draw what stays the same during it.
        """
        groups = _groups(parameters, how.lr)
        flat = [parameter for group in groups for parameter in group["params"]]
        for parameter in flat:
            parameter.requires_grad_(True)
        optimizer = _optimizer(groups, how)
        steps = -(-count // how.batch_size)
        first = 0
        self.monitor.begin(stage, how.epochs, steps)
        if (snapshot := self.monitor.restore(stage)) is not None:
            _put_back(snapshot, flat, optimizer)
            first = snapshot.epoch
        for epoch in range(first, how.epochs):
            if each_epoch is not None:
                each_epoch()
            self._epoch(stage, epoch, steps, groups, flat, count, loss, how, optimizer)
            _guard_parameters(stage, epoch, flat, how)
            last = epoch + 1 == how.epochs

            def take(done: int = epoch + 1, last: bool = last) -> Snapshot:
                return _take(done, flat, None if last else optimizer)

            self.monitor.finish_epoch(stage, epoch, last, take)
        for parameter in flat:
            parameter.requires_grad_(False)
            parameter.grad = None

    def _epoch(
        self,
        stage: str,
        epoch: int,
        steps: int,
        groups: list[dict[str, Any]],
        flat: list[nn.Parameter],
        count: int,
        loss: Callable[[Tensor], Tensor],
        how: Training,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        order = torch.randperm(count)
        losses: list[Tensor] = []
        for step, rows in enumerate(torch.split(order, how.batch_size)):
            rate = how.rate(epoch * steps + step, how.epochs * steps)
            for group, wanted in zip(optimizer.param_groups, groups, strict=True):
                group["lr"] = wanted["lr"] * rate
            with self.autocast():
                value = loss(_on_device(self._share(rows), self.device))
            optimizer.zero_grad(set_to_none=True)
            self._backward(value, flat)
            if how.clip_norm:
                nn.utils.clip_grad_norm_(flat, how.clip_norm)
            optimizer.step()
            losses.append(value.detach())
            self.monitor.step(stage, epoch, step, losses[-1], how.lr * rate)
            if len(losses) == CHECK_EVERY or step + 1 == steps:
                _guard(stage, epoch, step + 1 - len(losses), losses, how)
                losses = []

    def _share(self, rows: Tensor) -> Tensor:
        """The rows of this process, where several train together."""
        if self.fabric is None or self.fabric.world_size == 1:
            return rows
        own = rows[self.fabric.global_rank :: self.fabric.world_size]
        return own if len(own) else rows[:1]

    def _backward(self, value: Tensor, flat: list[nn.Parameter]) -> None:
        if self.fabric is None:
            value.backward()  # type: ignore[no-untyped-call]
            return
        self.fabric.backward(value)
        if self.fabric.world_size > 1:
            for parameter in flat:
                if parameter.grad is not None:
                    parameter.grad = self.fabric.all_reduce(parameter.grad, reduce_op="mean")


def _on_device(rows: Tensor, device: torch.device) -> Tensor:
    """The rows on the device. Where that is another tensor it carries the one on the host along, as `Pictures` wants
    it: pictures are read by the host, and fetching the rows back would wait for the whole step before."""
    moved = rows.to(device, non_blocking=True)
    if moved is not rows:
        moved.on_host = rows  # type: ignore[attr-defined]
    return moved


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


def _guard(stage: str, epoch: int, start: int, losses: list[Tensor], how: Training) -> None:
    values = torch.stack([loss.float() for loss in losses]).cpu()
    bad = torch.nonzero(~torch.isfinite(values)).flatten()
    if len(bad):
        step = start + int(bad[0])
        raise UserError(
            f"training diverged: the loss of stage '{stage}' is {values[bad[0]]:g} at epoch {epoch + 1},"
            f" step {step + 1} (learning rate {how.lr:g}); try a lower {stage}.lr, or {stage}.clip_norm=1"
        )


def _guard_parameters(stage: str, epoch: int, flat: list[nn.Parameter], how: Training) -> None:
    """The last step of an epoch can break what no later loss would show before it is kept."""
    if flat and not bool(torch.stack([torch.isfinite(parameter).all() for parameter in flat]).all()):
        raise UserError(
            f"training diverged: stage '{stage}' has a NaN or an infinity in its parameters after epoch {epoch + 1}"
            f" (learning rate {how.lr:g}); try a lower {stage}.lr, or {stage}.clip_norm=1"
        )


def _take(epoch: int, flat: list[nn.Parameter], optimizer: torch.optim.Optimizer | None) -> Snapshot:
    tensors = {f"parameter.{i}": parameter.detach().cpu().clone() for i, parameter in enumerate(flat)}
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    if optimizer is not None:
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                if value is not None:
                    tensors[f"optimizer.{index}.{key}"] = torch.as_tensor(value).detach().cpu().clone()
    return Snapshot(epoch, tensors)


def _put_back(snapshot: Snapshot, flat: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    state: dict[int, dict[str, Any]] = {}
    with torch.no_grad():
        for key, value in snapshot.tensors.items():
            kind, _, rest = key.partition(".")
            if kind == "parameter":
                flat[int(rest)].copy_(value)
            elif kind == "optimizer":
                index, _, name = rest.partition(".")
                state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(snapshot.tensors["random.cpu"])
    if "random.cuda" in snapshot.tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(snapshot.tensors["random.cuda"])

"""The training loop that all methods share.

A stage that was trained before is restored: from the folder of a stopped run, or from the cache that runs share. To
give the same bits, a loss may draw from torch's random state, but keeps nothing between epochs except the parameters.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
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

LARGE = 2**20
"""Above this many numbers Adam's step on a CPU is one pass over them: six times as fast, and differs by rounding."""


@options
class Training:
    """How one stage is trained.

    Examples:
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
    most_steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Maximum number of steps, however many pictures a task has; 0: no limit. The schedule ends with them."""
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
    """Receives the progress of training. Every event does nothing here; a subclass overrides those it needs.

    A run that is continued tells its callbacks every `step` and `end_task` before it again.

    Examples:
        >>> import clipcil, tempfile
        >>> class Curve(clipcil.Callback):
        ...     def end_task(self, results):
        ...         print(f"after task {len(results.after)}: {results.last > 50}")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     results = clipcil.Experiment("simplecil", tasks=2).run(f"{folder}/run", callbacks=[Curve()])
        after task 1: True
        after task 2: True
    """

    def begin_run(self, experiment: Any, folder: Path) -> None:
        """The run of a `clipcil.Experiment` in a folder begins, or is continued."""

    def begin_stage(self, stage: str, epochs: int, steps: int) -> None:
        """A stage of `epochs` epochs of `steps` steps each begins."""

    def step(self, stage: str, epoch: int, step: int, loss: Tensor, rate: float) -> None:
        """One step is done; `loss` is still on the device: reading it at once would synchronise with a GPU."""

    def end_stage(self, stage: str) -> None:
        """The stage is done."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """The block is part of phase `name`, such as "evaluation"."""
        return nullcontext()

    def end_task(self, results: Any) -> None:
        """A task is learnt and evaluated; `results` are the `clipcil.Results` after all tasks so far."""

    def end_run(self) -> None:
        """The run has ended or failed."""


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
        self.precision: str = fabric._precision.precision if fabric is not None else ""
        self._task, self._place = "", 0

    def begin_task(self, name: str) -> None:
        """Learning of a task begins; `name` distinguishes its stages from those of other tasks and runs."""
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
        """Train parameters by minibatches, or restore them where the stage was trained before.

        Training that diverges stops with a UserError that names the stage and the step.

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
        """
        optimizer = _optimizer(parameters, how)
        peaks = [group["lr"] for group in optimizer.param_groups]
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        count = data if isinstance(data, int) else len(data)
        steps = max(1, -(-count // how.batch_size))
        total = max(how.epochs, -(-how.steps // steps)) * steps
        total = min(total, how.most_steps) if how.most_steps else total
        how = replace(how, epochs=-(-total // steps))
        for callback in self.callbacks:
            callback.begin_stage(stage, how.epochs, steps)

        def report(place: int) -> None:
            rate = how.lr * how.rate(place, total)
            for callback in self.callbacks:
                callback.step(stage, place // steps, place % steps, losses[place], rate)

        entries = self._entries(optimizer, count, how, depends_on)
        losses = self._restore(entries, stage, trained)  # of every step, where the stage was trained before
        for place in range(len(losses)):
            report(place)

        # Scales the loss of 16-mixed; a step with an infinite gradient is left out and lowers the scale.
        scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "16-mixed")
        for parameter in trained:
            parameter.requires_grad_(True)
        ended = bool(losses) or not total
        while not ended:
            if each_epoch is not None:
                each_epoch()
            for rows in torch.split(torch.randperm(count), how.batch_size):
                rate = how.rate(len(losses), total)
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * rate
                moved = rows.to(self.device, non_blocking=True)
                with flushed_denormals():
                    with self.autocast():
                        value = loss(moved) if isinstance(data, int) else loss(moved, data[rows])
                    scaler.scale(value).backward()  # type: ignore[no-untyped-call]
                    average_gradients(trained)
                    scaler.unscale_(optimizer)
                    if how.clip_norm:
                        nn.utils.clip_grad_norm_(trained, how.clip_norm)
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad(set_to_none=True)  # here, so that the next forward pass has their memory
                losses.append(value.detach())
                if len(losses) % steps % CHECK_EVERY == 0:
                    _check_finite(losses, trained, stage, how, steps)
                report(len(losses) - 1)
                ended = len(losses) == total
                if ended:
                    break
        for parameter in trained:
            parameter.requires_grad_(False)
            parameter.grad = None

        if rank() == 0:
            kept = {f"parameter.{i}": parameter.detach() for i, parameter in enumerate(trained)} | random_state()
            for store, key in entries:
                if not store.paths(key):
                    with suppress(UserError):  # a full disk does not stop training; the checkpoint reports it
                        store.save(key, {**kept, "losses": torch.stack(losses)})
        for callback in self.callbacks:
            callback.end_stage(stage)

    def _entries(
        self, optimizer: torch.optim.Optimizer, count: int, how: Training, depends_on: Sequence[Input] | None
    ) -> list[tuple[TensorStore, str]]:
        """The stores that may hold this stage, each with its key."""
        self._place += 1
        entries = []
        if self.stages is not None:
            entries.append((self.stages, f"{self._task}-{self._place:02d}"))
        if self.cache is not None and depends_on is not None and self.device.type == "cpu" and world_size() == 1:
            rates = [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
            inputs = [repr(how), repr((count, rates)), self.precision, torch.get_rng_state(), *depends_on]
            inputs += [parameter for group in optimizer.param_groups for parameter in group["params"]]
            entries.append((self.cache, content_key(inputs)))
        return entries if how.epochs else []

    def _restore(
        self, entries: Sequence[tuple[TensorStore, str]], stage: str, trained: list[nn.Parameter]
    ) -> list[Tensor]:
        """Set parameters and random state to those after the stage. Returns its losses, none if no store holds it."""
        found = next((tensors for store, key in entries if (tensors := store.load(key)) is not None), None)
        found = from_first(found)  # where several processes work on a run, the first alone reads and writes files
        if found is None:
            return []
        try:
            with torch.no_grad():
                for index, parameter in enumerate(trained):
                    parameter.copy_(found[f"parameter.{index}"])
            set_random_state(found)
            return list(found["losses"])
        except (RuntimeError, LookupError, TypeError) as error:
            raise UserError(f"the stage '{stage}' that is stored does not fit; delete checkpoint/stages") from error


def _check_finite(
    losses: Sequence[Tensor], trained: Sequence[nn.Parameter], stage: str, how: Training, steps: int
) -> None:
    """Stop a stage of `steps` per epoch if one of the last `CHECK_EVERY` losses or a parameter is not finite."""
    values = torch.stack([loss.float() for loss in losses[-CHECK_EVERY:]])
    if bool(torch.stack([torch.isfinite(each).all() for each in (values, *trained)]).all()):
        return
    broken = torch.nonzero(~torch.isfinite(values)).flatten().tolist()
    place = len(losses) - len(values) + broken[0] if broken else len(losses) - 1
    if broken and place == 0:
        advice = "try a lower learning rate for the stage before it"
        raise UserError(f"training diverged before stage '{stage}': its first loss is {values[0]:g}; {advice}")
    what = f"the loss is {values[broken[0]]:g}" if broken else "a parameter is NaN or infinite"
    raise UserError(
        f"training diverged: in stage '{stage}' {what} at epoch {place // steps + 1}, step {place % steps + 1}"
        f" (learning rate {how.lr:g}); try a lower {stage}.lr, or {stage}.clip_norm=1"
    )


def _optimizer(parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]], how: Training) -> torch.optim.Optimizer:
    given: Any = list(parameters) or [{"params": []}]
    if how.optimizer == "sgd":
        return torch.optim.SGD(given, lr=how.lr, momentum=how.momentum, weight_decay=how.weight_decay)
    kind = torch.optim.AdamW if how.optimizer == "adamw" else torch.optim.Adam
    optimizer = kind(given, lr=how.lr, weight_decay=how.weight_decay)
    tensors = [each for group in optimizer.param_groups for each in group["params"] if each.device.type == "cpu"]
    if sum(each.numel() for each in tensors) > LARGE:
        optimizer = kind(given, lr=how.lr, weight_decay=how.weight_decay, fused=True)
    return optimizer

"""Live logs of a run in its folder: a CSV file, TensorBoard, Weights & Biases. Each is a callback.

A run that is continued writes its log anew: callbacks are told everything again.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipcil.plugins import need_extra
from clipcil.storage import claim, open_log, refuse_links, write_text
from clipcil.training.trainer import CHECK_EVERY, Callback

HEADER = "group,step,name,value\n"
"""The first line of `log.csv`."""


class Logger(Callback):
    """The base of the logs."""

    def begin_run(self, experiment: Any, folder: Path) -> None:
        self._waiting, self._steps = list[tuple[str, Tensor, float]](), Counter[str]()

    def log(self, group: str, step: int, numbers: dict[str, float]) -> None:
        """Add numbers of a stage at one of its steps, or of the group `accuracy` after a task."""
        raise NotImplementedError

    def step(self, stage: str, epoch: int, step: int, loss: Tensor, rate: float) -> None:
        self._waiting.append((stage, loss, rate))
        if len(self._waiting) >= CHECK_EVERY:  # losses are read from the device as often as training reads them anyway
            self.end_stage(stage)

    def end_stage(self, stage: str) -> None:
        losses = torch.stack([loss.float() for _, loss, _ in self._waiting]).tolist() if self._waiting else []
        for (name, _, rate), loss in zip(self._waiting, losses, strict=True):
            self._steps[name] += 1
            self.log(name, self._steps[name], {"loss": loss, "rate": rate})
        self._waiting.clear()

    def end_task(self, results: Any) -> None:
        self.end_stage("")
        numbers = {"A_k": results.last, "weighted": results.last_weighted, "forgetting": results.forgetting}
        numbers |= {"newest": float(results.matrix[-1, -1]), "first": float(results.matrix[-1, 0])}
        self.log("accuracy", len(results.records), numbers)


class CSVLog(Logger):
    """`log.csv`: a line for each number."""

    def begin_run(self, experiment: Any, folder: Path) -> None:
        super().begin_run(experiment, folder)
        self._path = folder / "log.csv"
        claim(self._path, HEADER, "log")
        write_text(self._path, HEADER)

    def log(self, group: str, step: int, numbers: dict[str, float]) -> None:
        with open_log(self._path) as file:
            file.write("".join(f"{group},{step},{name},{value}\n" for name, value in numbers.items()).encode())


class TensorBoardLog(Logger):
    """Events in the folder `tensorboard`."""

    def __init__(self) -> None:
        self._make = need_extra("torch.utils.tensorboard", "tensorboard").SummaryWriter

    def begin_run(self, experiment: Any, folder: Path) -> None:
        super().begin_run(experiment, folder)
        refuse_links(place := folder / "tensorboard")
        for path in place.glob("events.out.tfevents.*"):
            path.unlink()
        self._writer = self._make(str(place), flush_secs=1)

    def log(self, group: str, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def end_run(self) -> None:
        self._writer.close()


class WandbLog(Logger):
    """A run of Weights & Biases, configured by its own environment variables, such as `WANDB_MODE=offline`."""

    def __init__(self) -> None:
        self._wandb = need_extra("wandb")

    def begin_run(self, experiment: Any, folder: Path) -> None:
        super().begin_run(experiment, folder)
        refuse_links(folder / "wandb")
        own = hashlib.sha256(f"{experiment.mark} {folder.resolve()}".encode()).hexdigest()[:16]
        where = {"project": os.environ.get("WANDB_PROJECT", "clipcil"), "name": folder.name, "dir": str(folder)}
        self._run = self._wandb.init(id=own, resume="allow", config=experiment.table, **where)
        self._there, self._count = self._run.step, 0

    def log(self, group: str, step: int, numbers: dict[str, float]) -> None:
        if self._count >= self._there:  # a run that is continued has the numbers before
            values = {f"{group}/{name}": value for name, value in {**numbers, "step": step}.items()}
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")
            self._run.log(values, step=self._count)
        self._count += 1

    def end_run(self) -> None:
        self._run.finish()


LOGGERS = {"csv": CSVLog, "tensorboard": TensorBoardLog, "wandb": WandbLog}


def open_loggers(names: Iterable[str]) -> list[Logger]:
    """The logs of these names; a `UserError` names the extra that one needs."""
    return [LOGGERS[name]() for name in dict.fromkeys(names)]

"""The runs as TensorBoard event files."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from clipcil.errors import UserError
from clipcil.reading import MissingFileError, parse_json, read_text
from clipcil.report.runs import RunResult


def write_tensorboard(runs: Sequence[RunResult], folder: Path) -> None:
    """A folder of events for each run: accuracy by task, R, drift, and the loss of every step."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError("--tensorboard needs the package tensorboard; pip install 'clipcil[tensorboard]'")
    from torch.utils.tensorboard import SummaryWriter

    for run, name in zip(runs, own_names(runs), strict=True):
        writer = SummaryWriter(str(folder / name))

        def add(tag: str, value: float, step: int, writer: SummaryWriter = writer) -> None:
            writer.add_scalar(tag, value, step)

        for k, value in enumerate(run.values["after"]):
            add("accuracy/A_k", value, k + 1)
        for k, row in enumerate(run.values["matrix"]):
            for i, value in enumerate(row):
                if value is not None:
                    add(f"R/task {i + 1}", value, k + 1)
        for k, drift in enumerate(run.values.get("drift", [])):
            for name, value in (drift or {}).items():
                add(f"drift/{name}", value, k + 1)
        for step, (stage, loss) in enumerate(_losses(run.folder / "steps.jsonl")):
            add(f"loss/{stage}", loss, step)
        writer.close()


def own_names(runs: Sequence[RunResult]) -> list[str]:
    """The name of each run's folder; a number follows where another run has the same."""
    names: list[str] = []
    for run in runs:
        name, number = run.folder.resolve().name, 1
        while (unique := name if number == 1 else f"{name}-{number}") in names:
            number += 1
        names.append(unique)
    return names


def _losses(path: Path) -> list[tuple[str, float]]:
    try:
        lines = [parse_json(line, str(path)) for line in read_text(path).splitlines() if line]
        return [(str(line["stage"]), float(line["loss"])) for line in lines]
    except MissingFileError:
        return []
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not the log of a run ({type(error).__name__})") from error

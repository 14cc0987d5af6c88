"""Run folders as the engine writes them, with made-up numbers: a report needs no training to be tested."""

import csv
from pathlib import Path
from typing import Any

import tomli_w

from clipcil.data.dataset import open_dataset
from clipcil.experiment.evaluate import Record
from clipcil.experiment.results import Results
from clipcil.experiment.spec import RunSpec, as_table, method_settings
from clipcil.settings import parse_words
from clipcil.storage import write_json, write_text

PHASES = {"loading": 1.0, "stage1": 3.0, "stage2": 2.0, "learning": 6.0, "evaluation": 1.5, "drift": 0.5}


def write_run(
    folder: Path, method: str = "simplecil", seed: int = 0, right: float = 0.8, *words: str, **choices: Any
) -> Path:
    """A finished run of `tasks` tasks of two classes; `right` is the share of right answers on the newest task."""
    names, tasks, notes = choices.pop("names", None), choices.get("tasks", 3), choices.pop("notes", [])
    preset = choices.pop("preset", False)
    spec = RunSpec(**{"method": method, "seed": seed, "tasks": 3, **choices})
    table = as_table(spec, method_settings(spec, parse_words(words), preset=preset))
    names = names or open_dataset("emoji").classes[: 2 * tasks]
    total = 20
    records, drifts = [], []
    for k in range(tasks):
        share = [max(0.0, right - 0.05 * (k - i) - 0.01 * seed) for i in range(k + 1)]
        correct = [round(total * share[c // 2]) for c in range(2 * (k + 1))]
        between = [[2 * total if i == j else 0 for j in range(k + 1)] for i in range(k + 1)]
        if k:
            between[0] = [2 * total - 5, *([0] * (k - 1)), 5]
        records.append(Record(correct, [total] * 2 * (k + 1), between))
        steps = {"cosine_before": 0.1 + 0.02 * k, "cosine_after": 0.03, "w2_before": 0.8, "w2_after": 0.4}
        steps |= {"cosine_floor": 0.0, "w2_floor": 0.3}
        drifts.append(steps if k and method.startswith("dmc") else None)
    outcome = Results(table, names, [2] * tasks, records, drifts, notes)
    write_text(folder / "config.toml", tomli_w.dumps(table))
    write_json(folder / "timing.json", {"seconds": PHASES, "peak_megabytes": {}, "finished": "2026-01-31"})
    write_json(folder / "environment.json", {"python": "3.11", "torch": "2.13"})
    write_text(
        folder / "steps.jsonl", '{"task": 0, "stage": "stage1", "epoch": 0, "step": 0, "loss": 2.5, "rate": 0.1}\n'
    )
    write_predictions(folder, names, right)
    write_json(folder / "results.json", outcome.as_dict())
    return folder


def write_predictions(folder: Path, names: list[str], right: float) -> None:
    """Test pictures of the embedded data where the names are its classes; a share of `right` is taken for its own."""
    data = open_dataset("emoji")
    with (folder / "predictions.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["task", "row", "picture", "class", "predicted", "probability"])
        for index, (row, label) in enumerate(zip(data.test.rows.tolist(), data.test.labels.tolist(), strict=True)):
            if label < len(names):
                guess = names[(label + 1) % len(names)] if index * 7 % 10 >= 10 * right else names[label]
                sure = f"{0.5 + index % 40 / 100:.4f}"
                writer.writerow([label // 2 + 1, row, f"picture {row}", names[label], guess, sure])

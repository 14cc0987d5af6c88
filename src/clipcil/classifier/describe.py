"""What `clipcil show` tells about a model, without loading its backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cosine_similarity

from clipcil.classifier.model_folder import Facts, load_model, size_on_disk
from clipcil.errors import printable
from clipcil.memory.gaussians import GaussianMemory
from clipcil.methods.registry import find_method


def describe(folder: Path) -> dict[str, Any]:
    """Everything there is to say, as JSON can hold it."""
    facts, tensors = load_model(folder)
    moved = carried(tensors)
    tasks = [task for task, size in enumerate(facts.sizes) for _ in range(size)]
    classes = [
        {
            "name": known.name,
            "taught_as": known.text,
            "learnt": known.learnt,
            "newest": known.newest,
            "pictures": known.pictures,
            "task": task + 1,
            "moved": None if moved is None else round(float(moved[place]), 6),
        }
        for place, (known, task) in enumerate(zip(facts.known, tasks, strict=True))
    ]
    unknown = facts.calibration
    return {
        "method": facts.method,
        "backbone": facts.backbone,
        "fingerprint": facts.fingerprint,
        "seed": facts.seed,
        "lessons": facts.lessons,
        "tasks": len(facts.sizes),
        "bytes": size_on_disk(folder),
        "pictures_kept": 0,
        "exemplars_kept": exemplars(facts, tensors),
        "threshold": unknown.threshold,
        "false_alarms": unknown.false_alarms,
        "held_out": unknown.pictures,
        "classes": classes,
    }


def carried(tensors: dict[str, Tensor]) -> Tensor | None:
    """(C,): how far each class's mean was carried since it was learnt, 1 − cosine; None without a Gaussian memory.

    The true drift cannot be known without the old pictures; this is the part of it that calibration has followed.
    """
    own = {key[7:]: value for key, value in tensors.items() if key.startswith("memory.")}
    memory = GaussianMemory()
    if set(own) != set(memory.state_dict()):
        return None
    memory.load_state_dict(own)
    return (1 - cosine_similarity(memory.origin_means, memory.means(), dim=1)).clamp_min(0)


def exemplars(facts: Facts, tensors: dict[str, Tensor]) -> int:
    """Training pictures of which the model keeps the features."""
    if not find_method(facts.method).keeps_exemplars:
        return 0
    return sum(len(value) for key, value in tensors.items() if key.endswith("memory.labels"))


def print_description(folder: Path) -> None:
    facts = describe(folder)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    kept = facts["exemplars_kept"]
    console.print(
        f"{printable(folder)}: {facts['method']} on {printable(facts['backbone'])} ({facts['fingerprint']}),"
        f" {len(facts['classes'])} classes"
        f" from {facts['lessons']} lessons, {facts['bytes'] / 1e6:.1f} MB on disk"
    )
    console.print(
        f"keeps the features of {kept} training pictures (exemplars), no picture itself"
        if kept
        else "keeps no picture and no exemplars"
    )
    if facts["threshold"] is None:
        console.print("no threshold for 'none of these': no pictures were held out")
    else:
        console.print(
            f"'none of these' where the likeliest class is below {facts['threshold']:.1%}; false alarms on"
            f" {facts['held_out']} held-out pictures of known classes: {facts['false_alarms'] or 0:.1%}"
        )
    with_moved = any(row["moved"] is not None for row in facts["classes"])
    table = Table("class", "learnt", "newest", "pictures", "task", *(["moved"] if with_moved else []), box=None)
    for column in table.columns[3:]:
        column.justify = "right"
    for row in facts["classes"]:
        name = row["name"] if row["name"] == row["taught_as"] else f"{row['name']} (taught as {row['taught_as']})"
        cells = [name, row["learnt"], row["newest"], str(row["pictures"]), str(row["task"])]
        table.add_row(*map(printable, cells), *([f"{row['moved']:.4f}"] if with_moved else []))
    console.print(table)
    if with_moved:
        console.print("moved: how far calibration has carried the class's mean since it was learnt (1 − cosine)")

"""The output of `clipcil show`; the backbone is not loaded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor
from torch.nn.functional import cosine_similarity

from clipcil.classifier.card import kept_statistics
from clipcil.classifier.facts import Facts
from clipcil.classifier.held_out import PREFIX
from clipcil.classifier.model_folder import COPY, load_model, read_model, size_on_disk
from clipcil.classifier.small_pictures import SmallPictures
from clipcil.classifier.wording import counted, print_table, say, unknown_sentence
from clipcil.errors import UserError, printable, quoted
from clipcil.intervals import wilson_interval
from clipcil.memory.gaussians import GaussianMemory
from clipcil.methods.registry import find_method


def summarise(folder: Path) -> dict[str, Any]:
    """The whole summary as values that JSON can hold.

    Raises:
        UserError: There is no model, or it is damaged.
    """
    facts, tensors = load_model(folder)
    try:
        moved, kept = _moved(facts, tensors), _kept(facts, tensors)
    except Exception as error:  # untrusted weights can be of any shape, under any name
        raise UserError(f"the weights in {folder} do not fit its model ({type(error).__name__}); {COPY}") from error
    classes = [
        {
            "name": known.name,
            "taught_as": known.text,
            "learnt": known.learnt,
            "newest": known.newest,
            "pictures": known.pictures,
            "measured_on": known.held_out,
            "right": known.right,
            "task": task + 1,
            "moved": None if moved is None else round(moved[place], 6),
        }
        for place, (known, task) in enumerate(zip(facts.known, facts.task_of, strict=True))
    ]
    unknown = facts.calibration
    right, measured = sum(known.right for known in facts.known), sum(known.held_out for known in facts.known)
    return {
        "method": facts.method,
        "backbone": facts.backbone,
        "fingerprint": facts.fingerprint,
        "seed": facts.seed,
        "lessons": facts.lessons,
        "tasks": len(facts.sizes),
        "bytes": size_on_disk(folder),
        "pictures_kept": SmallPictures(folder).count,
        **kept,
        "accuracy": right / measured if measured else None,
        "history": [asdict(lesson) for lesson in facts.history],
        "threshold": unknown.threshold,
        "novelty": unknown.novelty,
        "false_alarms": unknown.false_alarms,
        "held_out": unknown.pictures,
        "classes": classes,
    }


def _moved(facts: Facts, tensors: dict[str, Tensor]) -> list[float] | None:
    moved = mean_shifts(tensors)
    if moved is None:
        return None
    if len(moved) != len(facts.known) or not bool(moved.isfinite().all()):
        raise ValueError("means that are not those of the classes")
    return [float(value) for value in moved]


def _kept(facts: Facts, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Of how many pictures the weights hold features."""
    return {
        "exemplars_kept": exemplars(facts, tensors),
        "features_kept": len(tensors.get(f"{PREFIX}labels", ())),
        "features_transported": int(tensors[f"{PREFIX}carried"].sum()) if f"{PREFIX}carried" in tensors else 0,
    }


def mean_shifts(tensors: dict[str, Tensor]) -> Tensor | None:
    """(C,): how far each class's mean was transported since it was learnt, 1 − cosine; None without a Gaussian memory.

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
    rows = ("memory.labels", "memory.codes")  # of `ExemplarMemory` and of `FeatureRows`
    return sum(len(value) for key, value in tensors.items() if key.endswith(rows))


def print_summary(folder: Path) -> None:
    """`clipcil show`, for people."""
    facts = summarise(folder)
    classes, lessons = counted(len(facts["classes"]), "class", "classes"), counted(facts["lessons"], "lesson")
    say(
        f"{quoted(folder)}: {facts['method']} on {facts['backbone']} ({facts['fingerprint']}), {classes} from"
        f" {lessons}, {facts['bytes'] / 1e6:.1f} MB on disk"
    )
    say(kept_sentence(facts["method"], facts["exemplars_kept"], facts["features_kept"], facts["pictures_kept"]))
    right, total = (sum(row[key] for row in facts["classes"]) for key in ("right", "measured_on"))
    if total and len(facts["classes"]) > 1:  # one class is always right
        low, high = wilson_interval(right, total)
        say(
            f"accuracy over all {classes}: {right / total:.1%} of {counted(total, 'picture')} kept for evaluation (95 %"
            f" interval {low:.0%} to {high:.0%})"
        )
    if facts["features_transported"]:
        say(
            f"features of {counted(facts['features_transported'], 'picture')} were transported when the tower changed;"
            " their part of the accuracy is an estimate"
        )
    say(unknown_sentence(read_model(folder).calibration))
    _print_classes(facts["classes"])


def kept_sentence(method: str, exemplars_kept: int, features_kept: int, pictures_kept: int = 0) -> str:
    """What the model holds of pictures."""
    kept = []
    if pictures_kept:
        kept.append(f"{counted(pictures_kept, 'small picture')} for the page of `clipcil serve`")
    if exemplars_kept:
        kept.append(f"the features of {counted(exemplars_kept, 'training picture')} (exemplars)")
    if statistics := kept_statistics(find_method(method)):
        kept.append(statistics)
    if features_kept:
        kept.append(f"the features of {counted(features_kept, 'picture')} for evaluation")
    start = "" if pictures_kept else "keeps no picture; " if kept else "keeps no picture and no features of pictures"
    return f"{start}keeps {' and '.join(kept)}" if kept else start


def _print_classes(classes: list[dict[str, Any]]) -> None:
    with_moved = any(row["moved"] is not None for row in classes)
    table = Table("class", "learnt", "newest", "pictures", "lesson", "right", box=None)
    if with_moved:
        table.add_column("moved")
    for column in table.columns[3:]:
        column.justify = "right"
    for row in classes:
        name = row["name"] if row["name"] == row["taught_as"] else f"{row['name']} (taught as {row['taught_as']})"
        told = f"{row['right']} of {row['measured_on']}" if row["measured_on"] else "–"
        cells = [printable(name), row["learnt"], row["newest"], str(row["pictures"]), str(row["task"]), told]
        table.add_row(*cells, *([f"{row['moved']:.4f}"] if with_moved else []))
    print_table(table)
    if with_moved:
        say("moved: how far calibration has moved the mean of the class since it was learnt (1 − cosine)")

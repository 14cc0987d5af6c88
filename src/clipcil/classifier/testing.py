"""The output of `clipcil test`."""

from __future__ import annotations

from rich.table import Table

from clipcil.classifier.classifier import Classifier
from clipcil.classifier.output import json_text
from clipcil.classifier.scoring import Evaluation
from clipcil.classifier.wording import (
    accuracy_sentence,
    confusion_sentence,
    counted,
    print_table,
    say,
    why_never_unknown,
)
from clipcil.errors import nearest, printable


def print_test(model: Classifier, found: Evaluation) -> None:
    """Accuracy, verdicts, confused pairs, and a table of the classes, the worst first."""
    for line in found.unreadable:
        say(f"cannot be read: {line}")
    if found.classes:
        table = Table("class", "pictures", "right", "", box=None)
        for column in table.columns[1:]:
            column.justify = "right"
        for result in sorted(found.classes, key=lambda result: result.accuracy or 0):
            share = f"{result.accuracy or 0:.0%}"
            table.add_row(printable(result.name), str(result.pictures), str(result.right), share)
        print_table(table)
        say(accuracy_sentence(found, len(model.classes), "", measured=len(found.classes)))
    else:
        say("no picture that can be read is of a class that the model knows")
    if found.confused:
        say(confusion_sentence(found, 5))
    _print_verdicts(model, found)


def _print_verdicts(model: Classifier, found: Evaluation) -> None:
    if model.calibration.threshold is None:
        say(f"'none of these' is never predicted: {why_never_unknown(model.calibration)}")
    elif found.pictures:
        alarms, share = found.false_alarms, found.false_alarms / found.pictures
        say(f"false alarms: {counted(alarms, 'picture')} of known classes called 'none of these' ({share:.1%})")
    if found.unknown_pictures:
        caught = found.unknown_pictures - found.missed
        say(
            f"unknown classes: {counted(found.unknown_pictures, 'picture')}, {caught} recognised as 'none of these',"
            f" {found.missed} missed ({found.missed / found.unknown_pictures:.1%})"
        )
        for name in found.unknown_classes[:5]:
            close = nearest(name, model.classes)
            if "did you mean" in close:
                say(f"note: the model does not know '{name}'{close}")


def print_json(model: Classifier, found: Evaluation) -> None:
    """One object with all of it."""
    low, high = found.interval
    value = {
        "pictures": found.pictures,
        "right": found.right,
        "accuracy": found.accuracy,
        "interval": [low, high] if found.pictures else None,
        "false_alarms": found.false_alarms,
        "unknown_pictures": found.unknown_pictures,
        "unknown_missed": found.missed,
        "unreadable": found.unreadable,
        "classes": [{"name": one.name, "pictures": one.pictures, "right": one.right} for one in found.classes],
        "confused": [{"true": one.true, "guess": one.guess, "pictures": one.pictures} for one in found.confused],
        "mistakes": [
            {
                "picture": str(one.picture),
                "true": one.true,
                "guess": one.guess,
                "probability": round(one.probability, 6),
            }
            for one in found.mistakes
        ],
    }
    print(json_text(value, indent=1))

"""S3: a practitioner's classifier: how long one picture takes, and how many a second a folder gives."""

import tempfile
from pathlib import Path

import torch

from benchmarks.harness import Row, alternate, duration
from clipcil.classifier.classifier import Classifier
from clipcil.data.dataset import open_dataset


def taught(method: str, classes: int) -> Classifier:
    """A classifier that has learnt the first classes of the embedded pictures."""
    train = open_dataset("emoji").train
    rows = [torch.nonzero(train.labels == label).flatten().tolist() for label in range(classes)]
    model = Classifier(method)
    model.learn({f"thing {c}": [train.image(row) for row in own] for c, own in enumerate(rows)}, hold_out=False)
    return model


def run(quick: bool) -> list[Row]:
    train, (classes, many) = open_dataset("emoji").train, (2, 8) if quick else (10, 512)
    model = taught("simplecil", classes)
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name) / f"{index}.png" for index in range(many)]
        for index, path in enumerate(paths):
            train.image(index % len(train)).resize((256, 256)).save(path)
        single = model.predict(paths[:1])[0].probabilities
        together = model.predict(paths)[0].probabilities
        sides = {"one": lambda: model.predict(paths[:1]), "folder": lambda: model.predict(paths)}
        seconds = alternate(sides, 3)
    error = max(abs(a - b) for a, b in zip(single, together, strict=True))
    one, folder, rate = duration(seconds["one"]), duration(seconds["folder"]), many / seconds["folder"]
    kept = [{"seconds": seconds[side]} for side in sides]
    return [
        Row("S3", "one picture (256×256 file)", "", one, one, error=error, tolerance=1e-6, details=kept[0]),
        Row("S3", f"a folder of {many} pictures", "", folder, f"{rate:.0f} a second", details=kept[1]),
    ]

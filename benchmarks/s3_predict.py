"""S3: a practitioner's classifier: how long one picture takes, and how many a second a folder gives."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.harness import Row, alternate, duration
from clipcil.classifier.classifier import Classifier
from clipcil.data.dataset import open_dataset


def run(quick: bool) -> list[Row]:
    train = open_dataset("emoji", None, {}).train
    classes, many = (2, 8) if quick else (10, 512)
    model = Classifier("simplecil")
    model.learn({f"thing {c}": [train.image(int(row)) for row in torch.nonzero(train.labels == c).flatten()]
                 for c in range(classes)}, hold_out=False)  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name) / f"{index}.png" for index in range(many)]
        for index, path in enumerate(paths):
            train.image(index % len(train)).resize((256, 256)).save(path)
        single = model.predict(paths[:1])[0].probabilities
        together = model.predict(paths)[0].probabilities
        sides = {"one": lambda: model.predict(paths[:1]), "folder": lambda: model.predict(paths)}
        seconds = alternate(sides, 3)
    error = max(abs(a - b) for a, b in zip(single, together, strict=True))
    return [
        Row("S3", "one picture (256×256 file)", "", duration(seconds["one"]), duration(seconds["one"]), error=error,
            tolerance=1e-6, details={"seconds": seconds["one"]}),
        Row("S3", f"a folder of {many} pictures", "", duration(seconds["folder"]),
            f"{many / seconds['folder']:.0f} a second", details={"seconds": seconds["folder"]}),
    ]  # fmt: skip

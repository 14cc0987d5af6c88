"""Figures for `docs/people.md`: which score tells unknown pictures, and lessons on real pictures.

python -m reproduce.lessons unknown [METHOD]     80 emoji classes learnt in four lessons, 20 never seen
python -m reproduce.lessons folder FOLDER N [METHOD…]
                                                  any folder of class folders, such as Caltech-101: 40 classes in five
                                                  lessons, N pictures each; 10 new pictures of each and of 20 others
"""

from __future__ import annotations

import random
import sys
import time
from math import nan
from pathlib import Path

import torch
from torch import Tensor

import clipcil
from clipcil.classifier.predict import Scores
from clipcil.classifier.scoring import probabilities
from clipcil.data.dataset import Dataset, open_dataset


def auroc(known: Tensor, unknown: Tensor) -> float:
    """The chance that a picture of a known class scores above one of an unknown class."""
    above, equal = known[:, None] > unknown[None], known[:, None] == unknown[None]
    return float(above.double().mean() + equal.double().mean() / 2)


def report(model: clipcil.Classifier, asked: list[tuple[str, object]]) -> None:
    found = [
        scores for _, scores in model.learner.scores([picture for _, picture in asked]) if isinstance(scores, Scores)
    ]
    logits = torch.stack([scores.logits for scores in found])
    novelty = torch.tensor([nan if scores.novelty is None else scores.novelty for scores in found])
    place = {name: index for index, name in enumerate(model.classes)}
    labels = torch.tensor([place.get(name, -1) for name, _ in asked])
    known = labels >= 0
    likeliest = probabilities(logits, model.calibration.temperature).max(dim=1).values
    right = (logits[known].argmax(1) == labels[known]).double().mean()
    print(f"accuracy over {len(place)} classes: {right:.1%} of {int(known.sum())} new pictures")
    scores = {"highest probability": likeliest, "highest logit": logits.max(dim=1).values, "novelty": -novelty}
    for name, score in scores.items():
        if not score.isnan().any():
            print(f"AUROC by {name}: {auroc(score[known], score[~known]):.3f}")
    strange = [model.calibration.is_unknown(*pair) for pair in zip(likeliest.tolist(), novelty.tolist(), strict=True)]
    below = torch.tensor(strange).double()
    print(f"called unknown: {below[known].mean():.1%} of known classes, {below[~known].mean():.1%} of unknown ones")


def unknown(method: str = "dmc-ot") -> None:
    data = open_dataset("emoji")
    order = torch.randperm(100, generator=torch.Generator().manual_seed(3))
    model = clipcil.Classifier(method)
    for classes in order[:80].split(20):
        rows = torch.isin(data.train.labels, classes).nonzero().flatten()
        lesson = model.learn(Dataset("emoji", data.classes, data.train.subset(rows), data.test, data.templates))
        print(f"held-out accuracy {lesson.accuracy:.1%}, threshold {lesson.calibration.threshold or 0:.3f}", flush=True)
    labels = data.test.labels.tolist()
    report(model, [(data.classes[label], data.test.image(row)) for row, label in enumerate(labels)])


def folder(root: str, pictures: str, *methods: str) -> None:
    """What a model says of itself beside what new pictures say, for each method."""
    folders = [path for path in sorted(Path(root).iterdir()) if path.is_dir()]
    random.Random(0).shuffle(folders)
    chosen = [path for path in folders if len(list(path.iterdir())) >= int(pictures) + 10][:60]
    files = {path.name: sorted(path.iterdir()) for path in chosen}
    for found in files.values():
        random.Random(1).shuffle(found)
    names = list(files)
    for method in methods or ("discriminant", "strata", "simplecil", "engine", "dmc-ot"):
        model, start = clipcil.Classifier(method), time.perf_counter()
        for first in range(0, 40, 8):
            told = model.learn({name: files[name][10 : 10 + int(pictures)] for name in names[first : first + 8]})
        seconds = time.perf_counter() - start
        found = model.test({name: files[name][:10] for name in names})
        said = "nothing" if told.accuracy is None else f"{told.accuracy:.1%} of {told.evaluation.pictures}"
        low, high = found.interval
        print(
            f"{method:13} {found.accuracy or 0:.1%} ({low:.1%} to {high:.1%}) of {found.pictures} new pictures;"
            f" the model says {said}; called unknown: {found.false_alarms / found.pictures:.1%} of known, expected"
            f" {model.calibration.false_alarms or 0:.1%}; {1 - found.missed / found.unknown_pictures:.1%} of unknown"
            f" classes; {seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    tasks = {"unknown": unknown, "folder": folder}
    if len(sys.argv) < 2 or sys.argv[1] not in tasks:
        sys.exit(__doc__)
    tasks[sys.argv[1]](*sys.argv[2:])  # type: ignore[operator]

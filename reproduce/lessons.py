"""Figures for `docs/people.md`: what a model says of itself beside what new pictures say.

python -m reproduce.lessons FOLDER N [METHOD…]   any folder of class folders, such as Caltech-101: 40 classes in five
                                                 lessons, N pictures each; 10 new pictures of each and of 20 others
"""

import random
import sys
import time
from pathlib import Path

import torch

import clipcil


def measure(root: Path, pictures: int, methods: list[str]) -> None:
    """Print a line for each method."""
    folders = [path for path in sorted(root.iterdir()) if path.is_dir()]
    random.Random(0).shuffle(folders)
    chosen = [path for path in folders if len(list(path.iterdir())) >= pictures + 10][:60]
    files = {path.name: sorted(path.iterdir()) for path in chosen}
    for found in files.values():
        random.Random(1).shuffle(found)
    names = list(files)
    for method in methods or ("discriminant", "strata", "simplecil", "engine", "dmc-ot"):
        model, start = clipcil.Classifier(method), time.perf_counter()
        for first in range(0, 40, 8):
            told = model.learn({name: files[name][10 : 10 + pictures] for name in names[first : first + 8]})
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
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    measure(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

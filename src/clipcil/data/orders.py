"""Class orders: which classes come first."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from clipcil.errors import UserError
from clipcil.reading import read_text


def class_order(spec: str, classes: list[str]) -> list[int]:
    """The order in which classes arrive, as indices into `classes`.

    `natural`: the dataset's own; `seed:N`: numpy's legacy permutation by seed N (`seed:1993` is the order most of the
    field uses: 68, 56, 78, … for 100 classes); `icarl`: the list of iCaRL for CIFAR-100; otherwise the path of a text
    file with one class per line, by index or by name.
    """
    count = len(classes)
    if spec == "natural":
        return list(range(count))
    if spec.startswith("seed:"):
        if not (_is_number(spec[5:]) and int(spec[5:]) < 2**32):
            raise UserError(f"class order '{spec}': write seed:N with a whole number N below 2^32, such as seed:1993")
        # The legacy generator, on purpose: its permutations are what published class orders are.
        return [int(i) for i in np.random.RandomState(int(spec[5:])).permutation(count)]
    if spec == "icarl":
        if count != len(ICARL):
            raise UserError(f"class order 'icarl' is a list of {len(ICARL)} classes; this dataset has {count}")
        return list(ICARL)
    return _from_file(Path(spec), classes)


def _from_file(path: Path, classes: list[str]) -> list[int]:
    if not path.is_file():
        raise UserError(f"class order '{path}' is neither natural, seed:N, icarl nor an existing file")
    text = read_text(path, links=True)
    place = {name: index for index, name in enumerate(classes)}
    order: list[int] = []
    for line in text.splitlines():
        # A whole line may be a name with a comma or a hyphen in it; else it is a list, also as YAML and JSON write it.
        words = [line.strip()] if line.strip() in place else re.split(r"[,\[\]]|^\s*-\s+", line)
        for word in filter(None, (word.strip().strip("'\"") for word in words)):
            index = place.get(word, int(word) if _is_number(word) else -1)
            if not 0 <= index < len(classes):
                raise UserError(f"{path}: '{word[:60]}' is neither a class name nor an index below {len(classes)}")
            order.append(index)
    if sorted(order) != list(range(len(classes))):
        wrong = next(i for i in range(len(classes)) if order.count(i) != 1)
        times = f"'{classes[wrong]}' ({wrong}) occurs {order.count(wrong)} times"
        raise UserError(f"{path}: every one of the {len(classes)} classes must occur once; {times}")
    return order


def _is_number(word: str) -> bool:
    """Whether `word` is a whole number; one of more than 20 digits is none here, and Python would not read any."""
    return word.isascii() and word.isdigit() and len(word) <= 20


ICARL = (
    87, 0, 52, 58, 44, 91, 68, 97, 51, 15, 94, 92, 10, 72, 49, 78, 61, 14, 8, 86,
    84, 96, 18, 24, 32, 45, 88, 11, 4, 67, 69, 66, 77, 47, 79, 93, 29, 50, 57, 83,
    17, 81, 41, 12, 37, 59, 25, 20, 80, 73, 1, 28, 6, 46, 62, 82, 53, 9, 31, 75,
    38, 63, 33, 74, 27, 22, 36, 3, 16, 21, 60, 19, 70, 90, 89, 43, 5, 42, 65, 76,
    40, 30, 23, 85, 2, 95, 56, 48, 71, 64, 98, 13, 99, 7, 34, 55, 54, 26, 35, 39,
)  # fmt: skip

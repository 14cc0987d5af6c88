"""Descriptions of pairs of classes: what is seen in one and not in the other.

The file is JSON, D[a][b] = a list of short phrases about class a that tell it from class b, such as
{"lynx": {"wolf": ["tufted ears", …]}, "wolf": {"lynx": […]}}. D[a][a] may hold phrases about a alone.
`clipcil describe` makes such a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipcil.clip import CLIP
from clipcil.errors import UserError
from clipcil.reading import MissingFileError, read_json

Table = dict[str, dict[str, list[str]]]


def read_table(path: Path) -> Table:
    """D[a][b] from a file; a file of another shape is a one-line error that says where."""
    try:
        return check_table(read_json(path, links=True), str(path))
    except MissingFileError as error:
        raise UserError(f"there is no file of descriptions {path}; make one with `clipcil describe`") from error


def check_table(raw: Any, called: str) -> Table:
    if not isinstance(raw, dict):
        raise UserError(f"{called} must hold an object D[a][b] of descriptions, not {_kind(raw)}")
    for first, row in raw.items():
        if not isinstance(row, dict):
            raise UserError(f"{called}: the entry of '{first}' must be an object of classes, not {_kind(row)}")
        for second, phrases in row.items():
            good = isinstance(phrases, list) and all(isinstance(phrase, str) for phrase in phrases)
            if not good or not any(phrase.strip() for phrase in phrases):
                raise UserError(f"{called}: ['{first}']['{second}'] must be a list of phrases with at least one in it")
    return raw


class Descriptions:
    """The sentences "a with <phrase>" of a file, for the classes it knows."""

    def __init__(self, table: Table, called: str = "the descriptions") -> None:
        self.table, self.called = table, called

    @classmethod
    def read(cls, path: Path) -> Descriptions:
        return cls(read_table(path), str(path))

    def require(self, names: Sequence[str]) -> None:
        """Every ordered pair of these classes must be described."""
        for first, second in permutations(names, 2):
            if second not in self.table.get(first, {}):
                raise UserError(
                    f"{self.called} does not tell '{first}' from '{second}'; run `clipcil describe` for all classes"
                )

    def sentences(self, first: str, second: str) -> list[str]:
        """`lynx with tufted ears`, … : what tells `first` from `second`."""
        phrases = (" ".join(phrase.split()) for phrase in self.table.get(first, {}).get(second, []))
        return [f"{first} with {phrase.rstrip('.')}" for phrase in phrases if phrase]


def encode_descriptions(clip: CLIP, known: Descriptions, pairs: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Sentences of these ordered pairs: raw text features (S, dim), and the place in `pairs` of each, (S,) int64.

    A sentence that several pairs share is encoded once.
    """
    texts: dict[str, int] = {}
    rows, owners = [], []
    for place, (first, second) in enumerate(pairs):
        for sentence in known.sentences(first, second):
            rows.append(texts.setdefault(shorten(clip, sentence, first), len(texts)))
            owners.append(place)
    device = clip.logit_scale.device
    if not rows:
        return torch.zeros(0, clip.config.dim, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    encoded = clip.encode_texts(list(texts))
    return encoded[torch.tensor(rows, device=device)], torch.tensor(owners, device=device)


def average_by_owner(vectors: Tensor, owners: Tensor, count: int) -> Tensor:
    """(count, dim): the mean of the vectors (S, dim) of each owner; zero for an owner without any."""
    total = vectors.new_zeros(count, vectors.shape[1]).index_add(0, owners, vectors)
    number = vectors.new_zeros(count).index_add(0, owners, vectors.new_ones(len(owners)))
    return total / number.clamp(min=1)[:, None]


def shorten(clip: CLIP, sentence: str, name: str) -> str:
    """Drop words from the end until the text tower can read it: a model's answer may run long; a name may not."""
    words = sentence.split()
    fewest = len(name.split())
    while len(" ".join(words).encode()) > clip.tokenizer.context - 2 and len(words) > fewest:
        try:
            clip.tokenizer([" ".join(words)])
            break
        except UserError:
            words.pop()
    return " ".join(words)


def _kind(value: Any) -> str:
    kinds = {"list": "a list", "str": "a text", "dict": "an object"}
    return kinds.get(type(value).__name__, f"{value!r}"[:40])

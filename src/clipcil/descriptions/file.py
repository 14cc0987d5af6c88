"""Descriptions of pairs of classes: visual features of one that the other does not have.

The file is JSON, D[a][b] = a list of short phrases about class a that tell it from class b, such as
{"lynx": {"wolf": ["tufted ears", …]}, "wolf": {"lynx": […]}}. D[a][a] may hold phrases about a alone.
`clipcil describe` makes such a file.
"""

from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from clipcil.clip import CLIP
from clipcil.errors import UserError
from clipcil.limits import MOST_OWN_TEXT
from clipcil.settings import typed
from clipcil.storage import MissingFileError, read_json

Phrase = Annotated[str, Field(pattern=r"\S")]
Table = dict[str, dict[str, Annotated[list[Phrase], Field(min_length=1)]]]


def read_descriptions(path: Path) -> Table:
    """D[a][b] from a file; a `UserError` names the entry of another shape."""
    try:
        values = read_json(path, MOST_OWN_TEXT, links=True)
    except MissingFileError as error:
        raise UserError(f"there is no file of descriptions {path}; make one with `clipcil describe`") from error
    table: Table = typed(values, Table, f"{path}: D")
    return table


def require_pairs(table: Table, names: Sequence[str], path: Path) -> None:
    """Refuse the file `path` if its table lacks an ordered pair of these classes."""
    for first, second in permutations(names, 2):
        if second not in table.get(first, {}):
            raise UserError(f"{path} does not tell '{first}' from '{second}'; run `clipcil describe` for all classes")


def sentences(table: Table, first: str, second: str) -> list[str]:
    """`lynx with tufted ears`, … : what tells `first` from `second`."""
    phrases = (" ".join(phrase.split()) for phrase in table.get(first, {}).get(second, []))
    return [f"{first} with {phrase.rstrip('.')}" for phrase in phrases]


def encode_descriptions(clip: CLIP, table: Table, pairs: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Encode the sentences of ordered pairs of classes; a sentence that several pairs share is encoded once.

    Returns:
        Raw text features (S, dim), and the index in `pairs` of each, (S,) int64.
    """
    texts: dict[str, int] = {}
    rows, owners = [], []
    for place, (first, second) in enumerate(pairs):
        for sentence in sentences(table, first, second):
            rows.append(texts.setdefault(shorten(clip, sentence, first), len(texts)))
            owners.append(place)
    device = clip.logit_scale.device
    if not rows:
        return torch.zeros(0, clip.config.dim, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    encoded = clip.encode_texts(list(texts))
    return encoded[torch.tensor(rows, device=device)], torch.tensor(owners, device=device)


def average_by_owner(vectors: Tensor, owners: Tensor, count: int) -> Tensor:
    """The mean of the vectors (S, dim) of each of `count` owners, (count, dim); zero for an owner without vectors."""
    total = vectors.new_zeros(count, vectors.shape[1]).index_add(0, owners, vectors)
    number = vectors.new_zeros(count).index_add(0, owners, vectors.new_ones(len(owners)))
    return total / number.clamp(min=1)[:, None]


def shorten(clip: CLIP, sentence: str, name: str) -> str:
    """Drop words from the end until the sentence fits the text tower; the words of `name` stay."""
    words, fewest = sentence.split(), len(name.split())
    while len(" ".join(words).encode()) > clip.tokenizer.context - 2 and len(words) > fewest:
        try:
            clip.tokenizer([" ".join(words)])
            break
        except UserError:
            words.pop()
    return " ".join(words)

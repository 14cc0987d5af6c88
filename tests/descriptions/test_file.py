"""Files of descriptions: read, checked, put into sentences, encoded once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from clipcil.clip import CLIP
from clipcil.descriptions.file import (
    average_by_owner,
    encode_descriptions,
    read_table,
    require_pairs,
    sentences,
    shorten,
)
from clipcil.errors import UserError
from support.errors import one_line

TABLE = {
    "cat": {"dog": ["a short nose.", "  upright   ears "], "cat": ["whiskers"]},
    "dog": {"cat": ["a long nose"]},
}


def write(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def test_sentences(tmp_path: Path) -> None:
    file = write(tmp_path / "d.json", TABLE)
    known = read_table(file)
    require_pairs(known, ["cat", "dog"], file)
    assert sentences(known, "cat", "dog") == ["cat with a short nose", "cat with upright ears"]
    assert sentences(known, "dog", "dog") == sentences(known, "bird", "cat") == []
    with one_line("'bird'", "d.json"):
        require_pairs(known, ["cat", "dog", "bird"], file)


@pytest.mark.parametrize(
    ("value", "entry"),
    [
        ([], "d.json"),
        ({"cat": {"dog": "x"}}, "D.cat.dog"),
        ({"cat": {"dog": []}}, "D.cat.dog"),
        ({"cat": {"dog": [" "]}}, "D.cat.dog.0"),
        ({"cat": {"dog": [1]}}, "D.cat.dog.0"),
        (None, "clipcil describe"),
    ],
)
def test_a_file_of_another_shape_is_one_line(tmp_path: Path, value: object, entry: str) -> None:
    with one_line(entry):
        read_table(write(tmp_path / "d.json", value) if value is not None else tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"cat": {', encoding="utf-8")
    with one_line("half.json"):
        read_table(tmp_path / "half.json")


def test_encoding_gives_raw_vectors_with_owners(tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"cat": {"dog": ["fur", "claws"], "cow": ["fur"]}}
    pairs = [("cat", "cow"), ("cow", "cat"), ("cat", "dog")]
    calls: list[list[str]] = []
    encode = tiny_clip.encode_texts
    with monkeypatch.context() as patch:
        patch.setattr(tiny_clip, "encode_texts", lambda texts: calls.append(list(texts)) or encode(texts))
        vectors, owners = encode_descriptions(tiny_clip, table, pairs)
    assert calls == [["cat with fur", "cat with claws"]]  # the sentence both pairs share is encoded once
    assert owners.tolist() == [0, 2, 2]
    expected = encode(["cat with fur", "cat with claws"])
    torch.testing.assert_close(vectors, expected[[0, 0, 1]])
    assert encode_descriptions(tiny_clip, {}, pairs)[0].shape == (0, tiny_clip.config.dim)
    means = average_by_owner(vectors, owners, 3)
    torch.testing.assert_close(means, torch.stack([expected[0], torch.zeros_like(expected[0]), expected.mean(0)]))


def test_a_long_answer_is_cut_between_words(tiny_clip: CLIP) -> None:
    sentence = "cat with " + " ".join(["stripes"] * 100)
    short = shorten(tiny_clip, sentence, "cat")
    assert sentence.startswith(short + " ") and short.startswith("cat with stripes")
    tiny_clip.tokenizer([short])
    with pytest.raises(UserError):
        tiny_clip.tokenizer([short + " stripes"])
    assert shorten(tiny_clip, "cat with claws", "cat") == "cat with claws"

"""Files of descriptions: read, checked, put into sentences, encoded once."""

import json
from pathlib import Path

import pytest
import torch

from clipcil.clip import CLIP
from clipcil.descriptions import file as module
from clipcil.errors import UserError
from support.errors import one_line

TABLE = {
    "cat": {"dog": ["a short nose.", "  upright   ears "], "cat": ["whiskers"]},
    "dog": {"cat": ["a long nose"]},
}


@pytest.mark.parametrize(
    ("value", "entry"),
    [
        ([], "d.json"),
        ({"cat": {"dog": "x"}}, "D.cat.dog"),
        ({"cat": {"dog": []}}, "D.cat.dog"),
        ({"cat": {"dog": [" "]}}, "D.cat.dog.0"),
        ({"cat": {"dog": [1]}}, "D.cat.dog.0"),
        (TABLE, ""),
        (None, "clipcil describe"),
    ],
)
def test_a_file_is_read_or_refused_in_one_line(tmp_path: Path, value: object, entry: str) -> None:
    file = tmp_path / "d.json"
    if value is not None:
        file.write_text(json.dumps(value), encoding="utf-8")
    if not entry:
        assert module.read_descriptions(file) == value
        return
    with one_line(entry):
        module.read_descriptions(file)


def test_sentences() -> None:
    module.require_pairs(TABLE, ["cat", "dog"], Path("d.json"))
    assert module.sentences(TABLE, "cat", "dog") == ["cat with a short nose", "cat with upright ears"]
    assert module.sentences(TABLE, "dog", "dog") == module.sentences(TABLE, "bird", "cat") == []
    with one_line("'bird'", "d.json"):
        module.require_pairs(TABLE, ["cat", "dog", "bird"], Path("d.json"))


def test_encoding_gives_raw_vectors_with_owners(tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"cat": {"dog": ["fur", "claws"], "cow": ["fur"]}}
    pairs = [("cat", "cow"), ("cow", "cat"), ("cat", "dog")]
    calls: list[list[str]] = []
    encode = tiny_clip.encode_texts
    with monkeypatch.context() as patch:
        patch.setattr(tiny_clip, "encode_texts", lambda texts: calls.append(list(texts)) or encode(texts))
        vectors, owners = module.encode_descriptions(tiny_clip, table, pairs)
    assert calls == [["cat with fur", "cat with claws"]]  # the sentence both pairs share is encoded once
    assert owners.tolist() == [0, 2, 2]
    expected = encode(["cat with fur", "cat with claws"])
    torch.testing.assert_close(vectors, expected[[0, 0, 1]])
    assert module.encode_descriptions(tiny_clip, {}, pairs)[0].shape == (0, tiny_clip.config.dim)
    means = module.average_by_owner(vectors, owners, 3)
    torch.testing.assert_close(means, torch.stack([expected[0], torch.zeros_like(expected[0]), expected.mean(0)]))


def test_a_long_answer_is_cut_between_words(tiny_clip: CLIP) -> None:
    sentence = "cat with " + " ".join(["stripes"] * 100)
    short = module.shorten(tiny_clip, sentence, "cat")
    assert sentence.startswith(short + " ") and short.startswith("cat with stripes")
    tiny_clip.tokenizer([short])
    with pytest.raises(UserError):
        tiny_clip.tokenizer([short + " stripes"])
    assert module.shorten(tiny_clip, "cat with claws", "cat") == "cat with claws"

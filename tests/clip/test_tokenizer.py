import json
from pathlib import Path

import pytest
import torch

from clipcil.clip import CLIP
from clipcil.clip.loading import MINI
from clipcil.clip.tokenizer import Tokenizer
from support.errors import one_line
from support.towers import with_other_tokenizer, write_openai_vocabulary


def edited(folder: Path, **changes: object) -> Tokenizer:
    """The tokenizer of mini with other parts in its file."""
    raw = json.loads((MINI / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps({**raw, **changes}), encoding="utf-8")
    return Tokenizer.from_folder(folder, 48)


def test_pads_to_the_longest_and_knows_the_ends(mini: CLIP) -> None:
    ids, ends = mini.tokenizer(["cat", "a photo of a cat", ""])
    assert ids.dtype == torch.int64 and ids.shape == (3, int(ends.max()) + 1) and ends[2] == 1
    assert ids[:, 0].tolist() == [mini.tokenizer.bos] * 3
    assert ids[torch.arange(3), ends].tolist() == [mini.tokenizer.eos] * 3
    first_end = (ids == mini.tokenizer.eos).int().argmax(1)  # transformers' rule
    assert first_end.tolist() == ends.tolist()
    assert [tuple(part.shape) for part in mini.tokenizer([])] == [(0, 0), (0,)]


@pytest.mark.parametrize("text", ["xylophone " * 60, "odd <|endoftext|> name"])
def test_a_text_that_is_too_long_or_has_an_end_inside_is_named(mini: CLIP, text: str) -> None:
    with one_line(text[:60]):
        mini.tokenizer(["cat", text])


def test_the_fingerprint_is_that_of_the_files(mini: CLIP, tmp_path: Path) -> None:
    seen = {mini.tokenizer.fingerprint, with_other_tokenizer(mini, tmp_path).tokenizer.fingerprint}
    (tmp_path / "tokenizer.json").unlink()
    write_openai_vocabulary(tmp_path)
    seen.add(Tokenizer.from_folder(tmp_path, 48).fingerprint)
    merges = tmp_path / "merges.txt"
    merges.write_text("\n".join(merges.read_text(encoding="utf-8").splitlines()[:-1]), encoding="utf-8")
    seen.add(Tokenizer.from_folder(tmp_path, 48).fingerprint)
    assert len(seen) == 4 and Tokenizer.from_folder(MINI, 48).fingerprint == mini.tokenizer.fingerprint


def test_truncation_inside_the_file_is_switched_off(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    _, ends = edited(tmp_path, truncation=cut)(["a photo of a big red truck in the rain"])
    assert ends.item() > 8


@pytest.mark.parametrize("content", [None, "", "{", '{"version": "1.0"}', "<html>"])
def test_a_missing_or_broken_tokenizer_is_one_line(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with one_line(str(tmp_path)):
        Tokenizer.from_folder(tmp_path, 48)


def test_another_models_tokenizer_is_refused(tmp_path: Path) -> None:
    with one_line("<|startoftext|>"):
        edited(tmp_path, post_processor=None)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with one_line(str(tmp_path)):
        Tokenizer.from_folder(tmp_path, 48)


def test_merges_that_make_no_token_are_refused(tmp_path: Path) -> None:
    """The library panics where what they make is longer than all tokens."""
    (tmp_path / "vocab.json").write_text('{"<|startoftext|>": 0, "<|endoftext|>": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n<|startoftext|> <|endoftext|>\n")
    with one_line(str(tmp_path), "<|startoftext|><|endoftext|>"):
        Tokenizer.from_folder(tmp_path, 48)

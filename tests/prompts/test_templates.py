"""Class texts: each sentence normalised, their mean, normalised again."""

from __future__ import annotations

import pytest
import torch

from clipcil.clip import CLIP
from clipcil.errors import UserError
from clipcil.prompts.templates import check_sentences, encode_classes, encode_sentences, fill

TEMPLATES = ("a photo of a {}.", "{}", "a drawing of a {}.")


def test_ensemble_by_hand(tiny_clip: CLIP) -> None:
    names = ["dog", "fire engine"]
    expected = []
    for name in names:
        total = torch.zeros(tiny_clip.config.dim)
        for template in TEMPLATES:
            text = tiny_clip.encode_texts([template.format(name)])[0]
            total += text / text.norm()
        expected.append(total / total.norm())
    assert torch.allclose(encode_classes(tiny_clip, names, TEMPLATES), torch.stack(expected), atol=1e-5)


def test_one_template_is_the_normalised_text(tiny_clip: CLIP) -> None:
    text = tiny_clip.encode_texts(["a photo of a cat."])
    ours = encode_classes(tiny_clip, ["cat"], TEMPLATES[:1])
    assert torch.allclose(ours, text / text.norm(), atol=1e-6)


def test_sentences_are_unit_and_in_order(tiny_clip: CLIP) -> None:
    sentences = encode_sentences(tiny_clip, ["cat", "dog"], TEMPLATES)
    assert sentences.shape == (2, 3, tiny_clip.config.dim)
    assert torch.allclose(sentences.norm(dim=-1), torch.ones(2, 3), atol=1e-5)
    alone = encode_sentences(tiny_clip, ["dog"], TEMPLATES[1:2])
    assert torch.allclose(sentences[1, 1], alone[0, 0], atol=1e-5)


def test_a_name_with_braces_is_taken_as_it_is() -> None:
    assert fill("a photo of a {}.", "{odd} name") == "a photo of a {odd} name."


def test_a_template_without_braces_is_refused(tiny_clip: CLIP) -> None:
    with pytest.raises(UserError, match="a photo of a thing"):
        encode_classes(tiny_clip, ["dog"], ["a photo of a thing"])
    with pytest.raises(UserError, match="at least one"):
        check_sentences(tiny_clip, ["dog"], [])

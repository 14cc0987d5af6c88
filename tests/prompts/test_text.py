"""Class texts from sentences and from soft prompts."""

import pytest
import torch

from clipcil.clip import CLIP
from clipcil.clip.text import padded
from clipcil.errors import UserError
from clipcil.prompts.templates import check_sentences, encode_classes, encode_sentences, fill
from clipcil.prompts.text import PromptTexts, encode_prompts, encode_shared

TEMPLATES = ("a photo of a {}.", "{}", "a drawing of a {}.")


def test_ensemble_by_hand(tiny_clip: CLIP) -> None:
    """Each sentence normalised, their mean, normalised again."""
    names, texts = ["dog", "fire engine"], []
    for name in names:
        found = [tiny_clip.encode_texts([template.format(name)])[0] for template in TEMPLATES]
        texts.append(torch.stack([text / text.norm() for text in found]))
    expected = [own.sum(0) / own.sum(0).norm() for own in texts]
    assert torch.allclose(encode_sentences(tiny_clip, names, TEMPLATES), torch.stack(texts), atol=1e-5)
    assert torch.allclose(encode_classes(tiny_clip, names, TEMPLATES), torch.stack(expected), atol=1e-5)


def test_a_name_with_braces_is_taken_as_it_is_and_a_template_without_is_refused(tiny_clip: CLIP) -> None:
    assert fill("a photo of a {}.", "{odd} name") == "a photo of a {odd} name."
    with pytest.raises(UserError, match="a photo of a thing"):
        encode_classes(tiny_clip, ["dog"], ["a photo of a thing"])
    with pytest.raises(UserError, match=r"\w"):
        check_sentences(tiny_clip, ["dog"], [])


@pytest.mark.parametrize("together", [False, True])
def test_a_beginning_computed_once_equals_encoding_each_prompt_and_has_the_same_gradient(
    tiny_clip: CLIP, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups of equal lengths, as on a CPU, and all together, as elsewhere."""
    texts = PromptTexts(tiny_clip, ["dog", "a very long name of a thing", "cat", "fire engine", "zebra"], 5, ".")
    if together:
        monkeypatch.setattr("clipcil.clip.text.without_padding", padded)
    context = torch.randn(1, 5, tiny_clip.config.text.width, generator=torch.Generator().manual_seed(0))
    alone, shared = context.clone().requires_grad_(), context.clone().requires_grad_()
    expected = encode_prompts(tiny_clip, [texts(alone)])
    ours = encode_shared(tiny_clip, texts, shared)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()
    (ours * weights).sum().backward()
    assert alone.grad is not None and shared.grad is not None and float(alone.grad.abs().max()) > 1e-3
    torch.testing.assert_close(shared.grad, alone.grad, atol=1e-3, rtol=1e-3)

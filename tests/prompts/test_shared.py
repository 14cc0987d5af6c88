"""A common beginning computed once gives the texts that encoding each on its own gives, and the same gradient."""

from __future__ import annotations

import pytest
import torch

from clipcil.clip import CLIP
from clipcil.prompts.text import PromptTexts, encode_prompts, encode_shared


@pytest.mark.parametrize("together", [False, True])
def test_equals_encoding_each_text(tiny_clip: CLIP, together: bool) -> None:
    """In groups of equal lengths, as on a CPU, and all together, as elsewhere."""
    texts = PromptTexts(tiny_clip, ["dog", "a very long name of a thing", "cat", "fire engine", "zebra"], 5, ".")
    assert len(texts.lengths) > 2
    if together:
        texts.lengths = ((5, texts.rest.shape[1]),)
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

"""Zero-shot CLIP: texts against pictures, nothing learnt."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from clipcil.clip import CLIP
from clipcil.methods.zero_shot import ZeroShot, ZeroShotConfig
from clipcil.training.trainer import Trainer
from support.features import WORDS, assert_batch_invariant, assert_survives_checkpoint, learn_all, make_tasks, make_test


def make(clip: CLIP, **options: object) -> ZeroShot:
    method = ZeroShot(ZeroShotConfig(**options), clip, Trainer())  # type: ignore[arg-type]
    method.templates = ("an icon of a {}.", "a drawing of a {}.")  # the dataset's; not used unless asked for
    return method


def test_scores_by_hand(tiny_clip: CLIP) -> None:
    method = learn_all(make(tiny_clip), make_tasks(tiny_clip, [3, 2]))
    pictures = make_test(tiny_clip, 5)
    texts = normalize(tiny_clip.encode_texts([f"a photo of a {name}." for name in WORDS[:5]]), dim=-1)
    expected = tiny_clip.scale * normalize(pictures.features, dim=-1) @ texts.T
    torch.testing.assert_close(method.logits(pictures), expected, atol=1e-4, rtol=1e-5)
    assert not list(method.parameters())
    assert_batch_invariant(method, pictures)
    assert_survives_checkpoint(method, make(tiny_clip), pictures)


def test_options_choose_the_sentences(tiny_clip: CLIP) -> None:
    def texts(**options: object) -> torch.Tensor:
        return learn_all(make(tiny_clip, **options), make_tasks(tiny_clip, [4])).texts  # type: ignore[return-value]

    photo, icon, drawing = texts(), texts(template="an icon of a {}."), texts(template="a drawing of a {}.")
    assert not torch.allclose(photo, drawing, atol=1e-3)
    torch.testing.assert_close(texts(ensemble=True), normalize(icon + drawing, dim=-1))

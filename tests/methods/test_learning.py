"""What methods share: they learn, and training may be augmented or in low precision."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from clipcil.clip import CLIP
from clipcil.memory.exemplars import Budget
from clipcil.methods import clap4clip, proof
from clipcil.methods.clap4clip import VisualGuidedAttention
from clipcil.methods.proof import Fusion
from clipcil.methods.registry import find_method
from clipcil.training.augment import Augment
from clipcil.training.trainer import Training
from support.visual_stream import FAST, all_tests, learnt, stream, tower

RAPF = {"adapter": replace(FAST, epochs=10), "threshold": 2.1, "replay_epoch": 0, "replay_each": 5, "pair_each": 4}
RANGES = {"prompt_range": (-1.0, 1.0), "key_range": (-1.0, 1.0)}
PROMPTS = replace(FAST, epochs=15)
ADAM = Training(epochs=10, lr=3e-3, optimizer="adam", batch_size=8)
MEMORY = Budget(3, "class")


@pytest.fixture(scope="module")
def clip() -> CLIP:
    return tower()


@pytest.mark.parametrize(
    ("name", "options", "module"),
    [
        ("l2p", {"train": PROMPTS, "pool": 6, "length": 2, "top_k": 3, **RANGES}, None),
        ("dualprompt", {"train": PROMPTS}, None),
        ("coda-prompt", {"train": PROMPTS, "components": 5, "length": 4}, None),
        ("rapf", RAPF, None),
        ("rapf", RAPF | {"widen": True}, None),
        ("engine", {"adapters": replace(FAST, epochs=6), "views": 2}, None),
        ("proof", {"train": ADAM, "memory": MEMORY}, proof),
        ("clap4clip", {"train": ADAM, "balance": ADAM, "memory": MEMORY, "hidden": 32}, clap4clip),
    ],
)
def test_it_learns(
    name: str, options: dict[str, Any], module: Any, clip: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, kind = stream(clip), find_method(name)
    method, pictures = learnt(kind, kind.Config(**options), clip, source).eval(), all_tests(source)
    with torch.no_grad():
        scores = method.logits(pictures)
    owner = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    told = scores.masked_fill(owner != owner[pictures.labels, None], -torch.inf)  # prompt methods do not compare tasks
    for answers, least in ((told, 0.7), (scores, 0.2 if "prompt" in method.keeps else 0.5)):  # chance: 0.375 and 0.125
        assert (answers.argmax(1) == pictures.labels).float().mean() > least
    if module:
        monkeypatch.setattr(module, "LARGEST_TENSOR", 1)  # one picture at a time
        torch.testing.assert_close(method.logits(pictures), scores, atol=1e-4, rtol=1e-5)


def score(attention: VisualGuidedAttention, texts: Tensor, pictures: Tensor) -> Tensor:
    return attention(texts, torch.zeros(9, 9, dtype=torch.bool), pictures).transpose(0, 1)


@pytest.mark.parametrize(
    ("module", "output"),
    [
        (lambda: Fusion(16, 0.0), lambda fusion, shared, pictures: fusion(pictures, shared, 7)),
        (lambda: VisualGuidedAttention(16, 20, 0.0), score),
    ],
)
def test_mixed_precision_gives_nearly_the_same_gradients(
    module: Callable[[], torch.nn.Module], output: Callable[..., Tensor]
) -> None:
    torch.manual_seed(0)
    built, shared, pictures = module().train(), torch.randn(9, 16), torch.randn(5, 16)
    trained = list(built.parameters())
    exact = torch.autograd.grad(output(built, shared, pictures).square().mean(), trained, allow_unused=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = output(built, shared, pictures).square().mean()
    for one, other in zip(torch.autograd.grad(mixed, trained, allow_unused=True), exact, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == torch.float32 and (one - other).abs().max() < 0.1 * other.abs().max())


@pytest.mark.parametrize(
    ("name", "stage", "options"),
    [
        *((name, "train", {}) for name in ("l2p", "dualprompt", "coda-prompt")),
        *(("dmc", "stage1", {"simultaneous": both, "stage2": Training(epochs=1)}) for both in (False, True)),
    ],
)
def test_augmented_training_is_another_the_same_for_a_seed_and_no_part_of_scoring(
    name: str, stage: str, options: dict[str, Any]
) -> None:
    def scores(how: Augment) -> Tensor:
        clip = tower()
        source = stream(clip, (2, 2), each=3)
        config = find_method(name).Config(**options, **{stage: replace(FAST, epochs=1, augment=how)})
        method, pictures = learnt(find_method(name), config, clip, source, 2), all_tests(source)
        with torch.no_grad():
            first = method.logits(pictures)
            assert torch.equal(first, method.logits(pictures))
        return first

    plain, cropped = scores("none"), scores("crop")
    assert not torch.allclose(plain, cropped, atol=1e-4)
    assert torch.equal(cropped, scores("crop"))

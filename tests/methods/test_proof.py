"""PROOF: sums of projections, a fusion that sees one picture, old projections that stay."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import layer_norm, normalize

from clipcil.clip import CLIP
from clipcil.memory.exemplars import Budget
from clipcil.methods import proof
from clipcil.methods.proof import PROOF, Fusion, PROOFConfig, TokenScores, project
from clipcil.training.cpu import draw_kept
from clipcil.training.trainer import Trainer, Training
from support.features import (
    accuracy,
    assert_batch_invariant,
    assert_survives_checkpoint,
    learn_all,
    make_tasks,
    make_test,
)

QUICK = Training(epochs=6, lr=0.02, optimizer="sgd", batch_size=16)


def make(clip: CLIP, **options: object) -> PROOF:
    torch.manual_seed(0)
    settings = {"train": QUICK, "memory": Budget(3, "class"), **options}
    templates = ("a photo of a {}.", "a drawing of a {}.")
    return PROOF(PROOFConfig(**settings), clip, Trainer(), templates)  # type: ignore[arg-type]


def plain_fusion(fusion: Fusion, picture: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """The block as it is written: self-attention over the whole sequence of one picture."""
    tokens = torch.cat([picture[None], shared])
    scores = fusion.query(tokens) @ fusion.key(tokens).T / math.sqrt(tokens.shape[1])
    return fusion.norm(tokens + fusion.out(scores.softmax(1) @ fusion.value(tokens)))


def test_fusion_is_self_attention_over_the_whole_sequence() -> None:
    torch.manual_seed(0)
    fusion = Fusion(16, 0.1).double().eval()
    torch.nn.init.normal_(fusion.out.bias)
    torch.nn.init.normal_(fusion.norm.weight)
    pictures, shared = torch.randn(5, 16).double() * 3, torch.randn(9, 16).double()
    scores = fusion(pictures, shared, 7)
    for index, picture in enumerate(pictures):
        expected = plain_fusion(fusion, picture, shared)
        torch.testing.assert_close(scores[index], expected[1:8] @ expected[0])
    assert fusion(pictures[:0], shared, 7).shape == (0, 7)


@pytest.mark.parametrize("size", [1, 200, 10**6])
def test_scores_of_tokens_have_the_gradients_of_autograd(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout: both sides take the same masks, in parts of one picture, of three and of all."""
    torch.manual_seed(0)
    monkeypatch.setattr(proof, "IN_CACHE", size)
    pictures, tokens, dim, share = 5, 4, 16, 0.25
    shapes = [(pictures, dim), (tokens, dim), (tokens, dim), (pictures, dim), (pictures, tokens), (pictures, tokens)]
    given = [torch.randn(*shape).double().requires_grad_() for shape in [*shapes, (dim,), (dim,), (dim,)]]
    masks = []

    def draw(*words: object) -> torch.Tensor:
        masks.append(draw_kept(*words))  # type: ignore[arg-type]
        return masks[-1]

    monkeypatch.setattr(proof, "draw_kept", draw)
    ours = TokenScores.apply(1e-5, share, *given)
    assert len(masks) == {1: 5, 200: 2, 10**6: 1}[size]
    fused, shared, among, own, alpha, dropped, centre, weight, bias = given
    mixed = among + alpha[..., None] * (centre - among) + dropped[..., None] * own[:, None]
    inside = shared + torch.cat(masks) * mixed / (1 - share)
    expected = torch.einsum("bd,bnd->bn", fused, layer_norm(inside, [dim], weight, bias, 1e-5))
    torch.testing.assert_close(ours, expected)
    direction = torch.randn(pictures, tokens).double()
    found = torch.autograd.grad((ours * direction).sum(), given)
    for one, other in zip(found, torch.autograd.grad((expected * direction).sum(), given), strict=True):
        torch.testing.assert_close(one, other)


def test_mixed_precision_gives_nearly_the_same_gradients() -> None:
    torch.manual_seed(0)
    fusion = Fusion(16, 0.0)
    pictures, shared = torch.randn(5, 16), torch.randn(9, 16)
    exact = torch.autograd.grad(fusion(pictures, shared, 7).square().mean(), list(fusion.parameters()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = fusion(pictures, shared, 7).square().mean()
    for one, other in zip(torch.autograd.grad(mixed, list(fusion.parameters())), exact, strict=True):
        assert one.dtype == torch.float32 and float((one - other).abs().max()) < 0.1 * float(other.abs().max())


def test_dropout_is_drawn_in_training_alone() -> None:
    torch.manual_seed(0)
    fusion = Fusion(8, 0.2)
    pictures, shared = torch.randn(2, 8), torch.randn(4, 8)
    assert not torch.equal(fusion(pictures, shared, 4), fusion(pictures, shared, 4))
    fusion.eval()
    assert torch.equal(fusion(pictures, shared, 4), fusion(pictures, shared, 4))


def test_scores_by_hand(tiny_clip: CLIP) -> None:
    tasks, pictures = make_tasks(tiny_clip, [2, 3]), make_test(tiny_clip, 5, per_class=2)
    method = learn_all(make(tiny_clip, raw_feature_at_test=False), tasks)
    assert isinstance(method, PROOF)

    def summed(x: torch.Tensor, projections: torch.nn.ModuleList) -> torch.Tensor:
        return sum(layer(x) for layer in projections)  # type: ignore[return-value]

    texts = []
    for name in method.names:
        both = tiny_clip.encode_texts([template.format(name) for template in method.templates])
        texts.append(normalize(normalize(summed(both, method.text_projections), dim=-1).mean(0), dim=-1))
    means = [
        normalize(task.pictures.features[task.pictures.labels == label], dim=-1).mean(0)
        for task in tasks
        for label in task.pictures.labels.unique()
    ]
    w, p = torch.stack(texts), normalize(summed(torch.stack(means), method.image_projections), dim=-1)
    shared = torch.cat([w, p, *method.contexts])
    for index, feature in enumerate(pictures.features):
        z = summed(feature, method.image_projections)
        out = plain_fusion(method.fusion, normalize(z, dim=-1), shared)
        expected = w @ z + out[1:6] @ out[0] + out[6:11] @ out[0]
        torch.testing.assert_close(method.logits(pictures[index : index + 1])[0], expected, atol=1e-3, rtol=1e-4)


def test_projections_add_up() -> None:
    layers = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(3)])
    x = torch.randn(4, 6)
    torch.testing.assert_close(project(x, layers), layers[0](x) + layers[1](x) + layers[2](x))


@pytest.mark.parametrize("train_old_text_projections", [False, True])
def test_what_is_frozen_stays(tiny_clip: CLIP, train_old_text_projections: bool) -> None:
    tasks = make_tasks(tiny_clip, [2, 2])
    method = make(tiny_clip, train_old_text_projections=train_old_text_projections)
    learn_all(method, tasks[:1])
    before = {name: value.clone() for name, value in method.state_dict().items()}
    tower = {name: value.clone() for name, value in tiny_clip.state_dict().items()}
    learn_all(method, tasks[1:])
    after = method.state_dict()
    for name in ("image_projections.0.weight", "image_projections.0.bias", "contexts.0"):
        assert torch.equal(before[name], after[name])
    assert torch.equal(before["prototypes"], after["prototypes"][:2])
    assert torch.equal(before["text_projections.0.weight"], after["text_projections.0.weight"]) != (
        train_old_text_projections
    )
    for name in ("fusion.query.weight", "logit_scale"):
        assert not torch.equal(before[name], after[name])
    assert all(torch.equal(value, tower[name]) for name, value in tiny_clip.state_dict().items())


def test_learns_and_judges_pictures_one_by_one(tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, pictures = make_tasks(tiny_clip, [3, 1, 2]), make_test(tiny_clip, 6)
    method = learn_all(make(tiny_clip), tasks)
    assert isinstance(method, PROOF)
    assert accuracy(method, pictures) > 0.6
    assert len(method.memory) == 18 <= method.memory.budget.in_all(6)
    assert_batch_invariant(method, pictures)
    assert_survives_checkpoint(method, make(tiny_clip), pictures)
    whole = method.logits(pictures)
    monkeypatch.setattr(proof, "LARGEST_TENSOR", 1)  # one picture at a time
    torch.testing.assert_close(method.logits(pictures), whole, atol=1e-4, rtol=1e-5)


def test_raw_feature_at_test_is_another_score(tiny_clip: CLIP) -> None:
    tasks, pictures = make_tasks(tiny_clip, [3]), make_test(tiny_clip, 3)
    unit = learn_all(make(tiny_clip, raw_feature_at_test=False), tasks).logits(pictures)
    raw_method = learn_all(make(tiny_clip), tasks)
    assert not torch.allclose(raw_method.logits(pictures), unit, atol=1e-2)
    assert_batch_invariant(raw_method, pictures)

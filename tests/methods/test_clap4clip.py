"""CLAP4CLIP: Gaussians around the class texts, moved by one picture at a time."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence
from torch.nn.functional import cross_entropy, normalize, softplus

from clipcil.clip import CLIP
from clipcil.errors import UserError
from clipcil.memory.exemplars import Budget
from clipcil.methods import clap4clip
from clipcil.methods.clap4clip import (
    CLAP4CLIP,
    Adapter,
    CLAP4CLIPConfig,
    VisualGuidedAttention,
    gaussian_kl,
    language_loss,
)
from clipcil.training.trainer import Trainer, Training
from support.features import (
    accuracy,
    assert_batch_invariant,
    assert_survives_checkpoint,
    learn_all,
    make_tasks,
    make_test,
)

QUICK = Training(epochs=6, lr=0.02, optimizer="sgd", batch_size=16, momentum=0.0, weight_decay=0.0)


def make(clip: CLIP, **options: object) -> CLAP4CLIP:
    torch.manual_seed(0)
    settings = {"train": QUICK, "balance": Training(epochs=1, lr=2e-3, optimizer="sgd"), "hidden": 32, **options}
    settings.setdefault("memory", Budget(3, "class"))
    templates = ("a photo of a {}.", "a drawing of a {}.")
    return CLAP4CLIP(CLAP4CLIPConfig(**settings), clip, Trainer(), templates)  # type: ignore[arg-type]


def test_attention_is_pytorch_decoder_layer_on_one_picture() -> None:
    torch.manual_seed(0)
    attention = VisualGuidedAttention(12, 20, 0.1).double().eval()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    texts, pictures = torch.randn(5, 12).double(), torch.randn(4, 12).double()
    tasks = torch.tensor([0, 0, 1, 1, 1])
    blocked = tasks[:, None] != tasks
    ours = attention(texts, blocked, pictures)
    expected = attention.layer(texts.expand(4, -1, -1), pictures[:, None], tgt_mask=blocked)
    torch.testing.assert_close(ours.transpose(0, 1), expected)


def test_attention_has_the_gradients_of_pytorch_decoder_layer() -> None:
    torch.manual_seed(0)
    attention = VisualGuidedAttention(12, 20, 0.0).double().train()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    texts, pictures = torch.randn(5, 12).double(), torch.randn(4, 12).double()
    blocked = torch.zeros(5, 5, dtype=torch.bool)
    direction = torch.randn(4, 5, 12).double()
    ours = attention(texts, blocked, pictures).transpose(0, 1)
    theirs = attention.layer(texts.expand(4, -1, -1), pictures[:, None], tgt_mask=blocked)
    trained = list(attention.parameters())
    found = torch.autograd.grad((ours * direction).sum(), trained, allow_unused=True)
    expected = torch.autograd.grad((theirs * direction).sum(), trained, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.zeros(1) if one is None else one, torch.zeros(1) if other is None else other)


def test_mixed_precision_gives_nearly_the_same_gradients() -> None:
    torch.manual_seed(0)
    attention = VisualGuidedAttention(12, 20, 0.0).train()
    texts, pictures, blocked = torch.randn(5, 12), torch.randn(4, 12), torch.zeros(5, 5, dtype=torch.bool)
    trained = [
        attention.layer.linear1.weight,
        attention.layer.norm2.weight,
        attention.layer.multihead_attn.out_proj.weight,
    ]
    direction = torch.randn(5, 4, 12)
    exact = torch.autograd.grad((attention(texts, blocked, pictures) * direction).sum(), trained)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = (attention(texts, blocked, pictures) * direction).sum()
    for one, other in zip(torch.autograd.grad(mixed, trained), exact, strict=True):
        assert one.dtype == torch.float32 and float((one - other).abs().max()) < 0.1 * float(other.abs().max())


def test_adapter_starts_from_the_texts() -> None:
    sentences = normalize(torch.randn(4, 3, 6), dim=-1)
    adapter = Adapter(6)
    biases = adapter.mean.bias.clone(), adapter.spread.bias.clone()
    adapter.start_from(sentences)
    hidden = torch.randn(2, 6)
    mean, spread = adapter.mean(hidden), adapter.deviation(hidden)
    centre = sentences.mean(1)
    torch.testing.assert_close(mean, hidden @ (centre.T @ centre / 6).T + biases[0])
    variance = ((sentences - centre[:, None]) ** 2).sum(1) / 2
    torch.testing.assert_close(spread, 0.001 + 0.999 * softplus(hidden @ (variance.T @ variance / 6).T + biases[1]))
    adapter.start_from(sentences[:, :1])  # one template has no spread, and no NaN either
    assert torch.isfinite(adapter.deviation(hidden)).all()


def test_kl_is_torch_distributions_kl() -> None:
    mean, spread = torch.randn(3, 4, 5), torch.rand(3, 4, 5) + 0.1
    ours = gaussian_kl(mean, spread)
    q, p = Normal(mean, spread), Normal(torch.zeros_like(mean), torch.ones_like(spread))
    torch.testing.assert_close(ours, kl_divergence(Independent(q, 1), Independent(p, 1)).mean())


def test_language_loss_by_hand() -> None:
    texts, mean = torch.randn(3, 5), torch.randn(3, 2, 5)
    ours = language_loss(texts, mean, torch.zeros(3, 2, 5), 20)
    expected = torch.stack([cross_entropy(texts @ mean[:, i].T, torch.arange(3)) for i in range(2)]).mean()
    torch.testing.assert_close(ours, expected)


def test_scores_are_those_of_sampled_weights(tiny_clip: CLIP) -> None:
    """Mean and deviation of s·v̂·(h + z) over many draws of z itself."""
    method = learn_all(make(tiny_clip), make_tasks(tiny_clip, [2, 1]))
    assert isinstance(method, CLAP4CLIP)
    unit = normalize(make_test(tiny_clip, 3, per_class=1).features, dim=-1)
    hidden = method.hidden(unit)
    spreads = method.spreads(hidden)
    mean, deviation = method.mean_scores(unit, hidden), method.score_deviations(unit, spreads)
    centres = torch.cat([adapter.mean(part) for adapter, part in zip(method.adapters, hidden.split([2, 1]))])
    z = centres + torch.cat(spreads) * torch.randn(20000, *hidden.shape)
    drawn = tiny_clip.scale * torch.einsum("bd,mcbd->mbc", unit, hidden + z)
    torch.testing.assert_close(drawn.mean(0), mean, atol=0.35, rtol=0.01)
    torch.testing.assert_close(drawn.std(0), deviation, atol=0, rtol=0.03)
    texts = normalize(method.sentences.mean(1), dim=-1)
    blocked = torch.tensor([[False, False, True], [False, False, True], [True, True, False]])
    torch.testing.assert_close(hidden, texts[:, None] + method.attention(texts, blocked, unit))
    exact = torch.einsum("bd,cbd->bc", unit, hidden + centres)
    torch.testing.assert_close(mean, tiny_clip.scale * exact)


def test_learns_and_judges_pictures_one_by_one(tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, pictures = make_tasks(tiny_clip, [3, 1, 2]), make_test(tiny_clip, 6)
    tower = {name: value.clone() for name, value in tiny_clip.state_dict().items()}
    untrained = learn_all(make(tiny_clip, train=Training(epochs=0), balance=Training(epochs=0)), tasks)
    method = learn_all(make(tiny_clip), tasks)
    assert isinstance(method, CLAP4CLIP)
    assert accuracy(method, pictures) > accuracy(untrained, pictures) + 0.1
    assert len(method.memory) == 18 <= method.memory.budget.in_all(6)
    assert all(torch.equal(value, tower[name]) for name, value in tiny_clip.state_dict().items())
    assert_batch_invariant(method, pictures)
    assert_survives_checkpoint(method, make(tiny_clip), pictures)
    whole = method.logits(pictures)
    monkeypatch.setattr(clap4clip, "LARGEST_TENSOR", 1)  # one picture at a time
    torch.testing.assert_close(method.logits(pictures), whole, atol=1e-4, rtol=1e-5)


def test_stages_train_what_they_should(tiny_clip: CLIP) -> None:
    """Stage 1 leaves old adapters alone; stage 2 moves all adapters and leaves the attention alone."""
    tasks, still = make_tasks(tiny_clip, [2, 2]), Training(epochs=0)
    method = learn_all(make(tiny_clip, balance=still), tasks[:1])
    before = {name: value.clone() for name, value in method.state_dict().items()}
    after = learn_all(method, tasks[1:]).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("adapters.0."))
    assert not torch.equal(before["attention.layer.linear1.weight"], after["attention.layer.linear1.weight"])

    method = learn_all(make(tiny_clip, train=still), tasks[:1])
    before = {name: value.clone() for name, value in method.state_dict().items()}
    after = learn_all(method, tasks[1:]).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("attention."))
    assert not torch.equal(before["adapters.0.mean.weight"], after["adapters.0.mean.weight"])


def test_sampling_at_test_is_reproducible_and_per_picture(tiny_clip: CLIP) -> None:
    tasks, pictures = make_tasks(tiny_clip, [2, 2]), make_test(tiny_clip, 4)
    method = learn_all(make(tiny_clip, test_samples=4), tasks)
    assert isinstance(method, CLAP4CLIP)
    assert_batch_invariant(method, pictures)
    torch.manual_seed(1)
    first = method.logits(pictures)
    torch.manual_seed(2)
    assert torch.equal(first, method.logits(pictures))
    assert torch.equal(method.test_noise()[:2], learn_all(make(tiny_clip, test_samples=4), tasks[:1]).test_noise())
    mean = learn_all(make(tiny_clip), tasks).logits(pictures)
    assert not torch.allclose(first, mean, atol=1e-2)
    other = learn_all(make(tiny_clip, test_samples=4, test_seed=9), tasks).logits(pictures)
    assert not torch.allclose(first, other, atol=1e-2)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_that_no_generator_takes_is_refused_before_anything_is_learnt(seed: int) -> None:
    with pytest.raises(UserError, match="'test_seed'"):
        CLAP4CLIPConfig(test_seed=seed)

"""CLAP4CLIP, facts read at srvCodes/clap4clip, commit 7ff95c2 (classifier/continual_clip_variational.py).

- One layer of PyTorch's TransformerDecoder (one head, GELU, batch first): class texts attend to the texts of their
  own task, then to the pictures; h = text + its output.
- For each task: μ = linear(h), σ = 0.001 + 0.999 softplus(linear(h)), M = 20 draws z; logits = s · v̂ · (h + z).
- Loss: cross-entropy over all draws, plus for the new task (stage 1) or *for every task, summed* (stage 2): 0.001 ·
  KL to N(0, I), mean over the task's classes and summed over dimensions, and 15 · cross-entropy over the task's own
  classes with logits S[c, c'] = mean over templates and draws of sentence_c,t · z_c', target c.
- New adapters: weight of μ = EᵀE/d with E the mean unit sentence of every class seen, weight of σ likewise from the
  *unbiased variance* over the sentences; the biases keep PyTorch's start.
- Stage 1 trains the decoder and the new adapters on new pictures and exemplars; stage 2, from the second task on, all
  adapters on exemplars alone with the decoder frozen. SGD without momentum, 1e-3 · 32 / 20, a tenth of it in stage 2.

The code lets the texts attend to all pictures of the batch. For a batch of one picture that changes nothing:
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy, normalize, softplus

from clipcil.clip import CLIP
from clipcil.memory.exemplars import Budget
from clipcil.methods.clap4clip import CLAP4CLIP, CLAP4CLIPConfig, VisualGuidedAttention
from clipcil.training.trainer import Trainer, Training
from support.features import learn_all, make_tasks, make_test
from support.visual_stream import Recorder

TEMPLATES = ("a photo of a {}.", "a drawing of a {}.", "art of the {}.")
SIZES = [2, 3, 2]


def learnt(clip: CLIP) -> tuple[CLAP4CLIP, Recorder]:
    session = Recorder()
    config = CLAP4CLIPConfig(memory=Budget(2, "class"), hidden=16, dropout=0.0, samples=5)
    method = CLAP4CLIP(config, clip, session, TEMPLATES)
    torch.manual_seed(0)
    for task in make_tasks(clip, SIZES):
        method.learn(task)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.normal_(std=0.3)
    return method, session


def literal(method: CLAP4CLIP, clip: CLIP, unit: Tensor, terms: list[int], noise: bool) -> tuple[Tensor, Tensor]:
    """Logits (C,) of one unit picture (d,), the mean over draws, and the regularisers of the tasks in `terms`."""
    every = torch.stack([normalize(clip.encode_texts([t.format(n) for t in TEMPLATES]), dim=-1) for n in method.names])
    texts = normalize(every.mean(1), dim=-1)
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES))
    mask = owner[:, None] != owner
    hidden = texts + method.attention.layer(texts[None], unit[None, None], tgt_mask=mask)[0]
    logits, value = [], torch.zeros(())
    for task, one in enumerate(torch.split(every, SIZES)):
        rows, adapter = owner == task, cast(Any, method.adapters[task])
        q = Normal(adapter.mean(hidden[rows]), softplus(adapter.spread(hidden[rows])) * 0.999 + 0.001)
        z = q.rsample(torch.Size([40_000])) if noise else q.mean[None]
        logits.append((clip.logit_scale.exp() * unit @ (hidden[rows] + z).transpose(1, 2)).mean(0))
        if task in terms:
            p = Normal(torch.zeros_like(q.mean), torch.ones_like(q.mean))
            value = value + 0.001 * kl_divergence(q, p).mean(0).sum()
            similar = torch.stack([sentences @ z.mean(0).T for sentences in one]).mean(1)  # (c, c')
            value = value + 15 * cross_entropy(similar, torch.arange(len(one)))
    return torch.cat(logits), value


def test_score_is_the_mean_over_the_reference_draws(tiny_clip: CLIP) -> None:
    method, _ = learnt(tiny_clip)
    feature = make_tasks(tiny_clip, [1])[0].pictures.features[:1]
    torch.manual_seed(1)
    with torch.no_grad():
        expected, _ = literal(method, tiny_clip, normalize(feature[0], dim=0), [], noise=True)
        unit = normalize(feature, dim=1)
        hidden = method.hidden(unit)
        mean, deviation = method.mean_scores(unit, hidden), method.score_deviations(unit, method.spreads(hidden))
    assert ((mean[0] - expected).abs() < 5 * deviation[0] / 200).all()  # five standard errors of 40,000 draws


def test_losses_of_both_stages_and_what_they_train_are_the_reference(tiny_clip: CLIP, monkeypatch: Any) -> None:
    """Without noise in the draws, so that both sides see the same z = μ."""
    method, session = learnt(tiny_clip)
    new, adapters = list(method.adapters[-1].parameters()), list(method.adapters.parameters())
    for stage, trained in (("train", [*method.attention.parameters(), *new]), ("balance", adapters)):
        assert {id(p) for p in session.stages[stage][1]} == {id(p) for p in trained}
    exemplars, labels = method.memory.features, method.memory.labels
    last = make_tasks(tiny_clip, SIZES)[2].pictures
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: torch.zeros(*shape))
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    cases = {"train": (last.features, last.labels, [2]), "balance": (exemplars, labels, [0, 1, 2])}
    for stage, (features, targets, terms) in cases.items():
        for row in (0, 3):
            logits, value = literal(method, tiny_clip, normalize(features[row], dim=0), terms, noise=False)
            expected = cross_entropy(logits[None], targets[row : row + 1]) + value
            ours = session.stages[stage][0](torch.tensor([row]))
            torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-4)


def test_new_adapters_start_as_the_reference(tiny_clip: CLIP) -> None:
    method = CLAP4CLIP(CLAP4CLIPConfig(hidden=16), tiny_clip, Recorder(), TEMPLATES)
    method.grow(["dog", "cat"])
    method.grow(["tree"])
    sentences = [normalize(tiny_clip.encode_texts([t.format(n) for t in TEMPLATES]), dim=-1) for n in method.names]
    means = torch.stack([one.mean(0) for one in sentences])
    variances = torch.stack([((one - one.mean(0)) ** 2).sum(0) / (len(TEMPLATES) - 1) for one in sentences])
    adapter: Any = method.adapters[1]
    for layer, about in ((adapter.mean, means), (adapter.spread, variances)):
        torch.testing.assert_close(layer.weight, about.T @ about / tiny_clip.config.dim, atol=1e-6, rtol=1e-4)
        bound = tiny_clip.config.dim**-0.5
        assert bool(layer.bias.any()) and float(layer.bias.abs().max()) <= bound


def test_attention_is_pytorch_decoder_layer_on_one_picture_and_has_its_gradients() -> None:
    torch.manual_seed(0)
    attention = VisualGuidedAttention(12, 20, 0.0).double().train()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    texts, pictures = torch.randn(5, 12).double(), torch.randn(4, 12).double()
    tasks = torch.tensor([0, 0, 1, 1, 1])
    blocked = tasks[:, None] != tasks
    direction = torch.randn(4, 5, 12).double()
    ours = attention(texts, blocked, pictures).transpose(0, 1)
    theirs = attention.layer(texts.expand(4, -1, -1), pictures[:, None], tgt_mask=blocked)
    torch.testing.assert_close(ours, theirs)
    trained = list(attention.parameters())
    found = torch.autograd.grad((ours * direction).sum(), trained, allow_unused=True)
    expected = torch.autograd.grad((theirs * direction).sum(), trained, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.zeros(1) if one is None else one, torch.zeros(1) if other is None else other)


def test_sampling_at_test_is_reproducible_and_per_picture(tiny_clip: CLIP) -> None:
    def taught(tasks: int = 2, **options: Any) -> CLAP4CLIP:
        still = Training(epochs=0)
        config = CLAP4CLIPConfig(train=still, balance=still, hidden=32, memory=Budget(3, "class"), **options)
        torch.manual_seed(0)
        method = CLAP4CLIP(config, tiny_clip, Trainer(), TEMPLATES)
        learn_all(method, make_tasks(tiny_clip, [2, 2])[:tasks])
        return method

    pictures, method = make_test(tiny_clip, 4), taught(test_samples=4)
    first = method.logits(pictures)
    torch.manual_seed(2)
    assert torch.equal(first, method.logits(pictures))
    assert torch.equal(method.test_noise()[:2], taught(1, test_samples=4).test_noise())
    for other in (taught(), taught(test_samples=4, test_seed=9)):
        assert not torch.allclose(first, other.logits(pictures), atol=1e-2)

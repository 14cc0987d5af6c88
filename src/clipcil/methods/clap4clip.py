"""CLAP4CLIP (https://arxiv.org/abs/2403.19137): every class text becomes a Gaussian that depends on the picture.

    h_c = t̂_c + VGA_c(x),    z ~ N(μ_i(h_c), σ_i(h_c)²) for class c of task i,    score = s · v̂(x)·(h_c + z)
    loss = CE over all classes, averaged over M samples, + Σ_i (kl · KL(q_i ‖ N(0, I)) + language · L_lang,i)

i is the new task in stage 1 and every task in stage 2. A score is linear in z, so its samples are drawn as Gaussians
with variance s² Σ v̂² σ²: B·C numbers a sample, not B·C·d.

Read at srvCodes/clap4clip, commit 7ff95c2; `docs/baselines.md` lists what differs and compares whole runs. Sampling at
test is off unless asked for: the mean of the logits over many samples is the logit of the mean.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, cast

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, normalize, softplus

from clipcil.data.reader import Batch
from clipcil.data.tasks import Task
from clipcil.memory.exemplars import Budget, ExemplarMemory
from clipcil.methods.base import LARGEST_TENSOR, Method
from clipcil.methods.registry import register
from clipcil.prompts.templates import check_sentences, encode_sentences, ensemble
from clipcil.settings import options
from clipcil.training.cpu import quick_dropout
from clipcil.training.trainer import Training


@options
class CLAP4CLIPConfig:
    """The reference's values; its README trains 5 + 2 epochs, its script 1 + 1: the README is followed."""

    train: Training = Training(
        epochs=5, lr=1.6e-3, batch_size=32, optimizer="sgd", weight_decay=0, momentum=0, warmup=0.3
    )
    """Stage 1, attention and the new adapters, on the task's pictures and the exemplars."""
    balance: Training = Training(epochs=2, lr=1.6e-4, batch_size=32, optimizer="sgd", weight_decay=0, momentum=0)
    """Stage 2, all adapters, on the exemplars of all classes; from the second task on."""
    samples: PositiveInt = 20
    """M, samples of each class while training."""
    test_samples: NonNegativeInt = 0
    """Samples of each class at test, the same for every picture; 0: the mean, which needs no samples."""
    test_seed: Annotated[int, Field(ge=0, le=2**62)] = 0
    """Seed of the samples at test."""
    kl: NonNegativeFloat = 1e-3
    """Weight of KL(q ‖ N(0, I))."""
    language: NonNegativeFloat = 15.0
    """β, weight of the loss that keeps the sampled residuals near the texts."""
    hidden: PositiveInt = 2048
    """Hidden width of the attention layer's MLP."""
    dropout: Annotated[float, Field(ge=0, le=0.99)] = 0.1
    """Dropout in the attention layer."""
    memory: Budget = Budget()
    """Exemplars, chosen by herding."""


class VisualGuidedAttention(nn.Module):
    """One layer of a transformer decoder: class texts attend to the texts of their own task, then to one picture.

    Equal to nn.TransformerDecoderLayer on targets (B, C, d) and memory (B, 1, d), and computed in less: the texts'
    attention among themselves does not depend on the picture, attention to a single token is its value, and the MLP's
    first layer is taken of texts and pictures apart. With a_c and s_b what texts and pictures add to a token, both
    centred over d, its LayerNorm is r_cb (a_c + s_b) ⊙ γ + β, r_cb = (mean((a_c + s_b)²) + ε)^(−1/2), and hence

        W LayerNorm + bias = r_cb (W (γ ⊙ a_c) + W (γ ⊙ s_b)) + (W β + bias):

    C + B products with W in place of C · B.
    """

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(dim, 1, hidden, dropout, activation=gelu, batch_first=True)

    def forward(self, texts: Tensor, blocked: Tensor, pictures: Tensor) -> Tensor:
        """Texts (C, d), pictures (B, d) and blocked (C, C), True where a class must not attend → (C, B, d)."""
        layer, dim = self.layer, texts.shape[1]
        mixed, _ = layer.self_attn(texts[None], texts[None], texts[None], attn_mask=blocked, need_weights=False)
        around = layer.norm1(texts + layer.dropout1(mixed[0]))  # (C, d), the same for all pictures
        cross = layer.multihead_attn
        value = linear(pictures, cross.in_proj_weight[2 * dim :], cross.in_proj_bias[2 * dim :])
        seen = layer.dropout2(cross.out_proj(value))  # (B, d)
        around, seen = around - around.mean(1, keepdim=True), seen - seen.mean(1, keepdim=True)
        variance = (around.square().sum(1, keepdim=True) + seen.square().sum(1) + 2 * around @ seen.T) / dim
        scale = (variance + layer.norm2.eps).rsqrt()  # (C, B)
        around, seen, shift = around * layer.norm2.weight, seen * layer.norm2.weight, layer.norm2.bias
        hidden = torch.addcmul(shift, around[:, None] + seen, scale[..., None])  # norm2 of the sum, (C, B, d)
        first = layer.linear1
        parts = (linear(around, first.weight), linear(seen, first.weight), linear(shift, first.weight, first.bias))
        active: Tensor = ActiveSum.apply(scale, *parts)  # type: ignore[no-untyped-call]
        inner = layer.linear2(quick_dropout(active, layer.dropout.p) if self.training else active)
        return layer.norm3(hidden + layer.dropout3(inner))


class ActiveSum(torch.autograd.Function):
    """gelu(r_cb (p_c + q_b) + k), with a backward pass that reads (C, B, hidden) numbers as few times as possible."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, texts: Tensor, pictures: Tensor, shift: Tensor) -> Tensor:
        """Scale (C, B), texts (C, hidden), pictures (B, hidden), shift (hidden,) → (C, B, hidden)."""
        before = (texts[:, None] + pictures).mul_(scale[..., None]).add_(shift)
        ctx.save_for_backward(before, scale, texts, pictures)
        return gelu(before)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        before, scale, texts, pictures = ctx.saved_tensors
        gradient = torch.ops.aten.gelu_backward(gradients[0], before)
        by_picture, scale = gradient.transpose(0, 1), scale.to(gradient.dtype)
        of_scale = (gradient @ texts[..., None])[..., 0] + (by_picture @ pictures[..., None])[..., 0].T
        of_texts, of_pictures = scale[:, None] @ gradient, scale.T[:, None] @ by_picture
        return of_scale, of_texts[:, 0], of_pictures[:, 0], gradient.sum((0, 1))


class Adapter(nn.Module):
    """q(z | h) of one task: μ(h) = A h + a, σ(h) = 0.001 + 0.999 softplus(S h + s)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def deviation(self, hidden: Tensor) -> Tensor:
        """σ(h), of the shape of h."""
        return 0.001 + 0.999 * softplus(self.spread(hidden))

    def project(self, unit: Tensor, hidden: Tensor) -> Tensor:
        """v̂·(h + μ(h)) of pictures (B, d) and h (C, B, d), (B, C), without μ(h): (v̂ + Aᵀv̂)·h + v̂·a, which takes B
        products with A in place of C · B."""
        query = unit + unit @ self.mean.weight
        return torch.einsum("bd,cbd->bc", query, hidden) + (unit @ self.mean.bias)[:, None]

    @torch.no_grad()
    def start_from(self, sentences: Tensor) -> None:
        """A = EᵀE/d with E (C, d) the mean sentence of every class seen; S likewise from the unbiased variance over the
        sentences of a class, 0 where there is only one. The biases keep PyTorch's random start, as the authors'.
        """
        spreads = sentences.var(1) if sentences.shape[1] > 1 else torch.zeros_like(sentences[:, 0])
        for linear_map, texts in ((self.mean, sentences.mean(1)), (self.spread, spreads)):
            linear_map.weight.copy_(texts.T @ texts / texts.shape[1])


@register
class CLAP4CLIP(Method):
    name = "clap4clip"
    title = "CLAP4CLIP"
    Config = CLAP4CLIPConfig
    keeps = "exemplars"
    keeps_exemplars = True
    config: CLAP4CLIPConfig
    sentences: Tensor  # (C, T, dim): unit texts of all templates

    def build(self) -> None:
        self.memory = ExemplarMemory(self.dim, self.config.memory)
        self.attention = VisualGuidedAttention(self.dim, self.config.hidden, self.config.dropout).requires_grad_(False)
        self.adapters = nn.ModuleList()  # a task each
        self.growing_buffer("sentences", len(self.templates), self.dim, persistent=False)

    def check_names(self, names: Sequence[str]) -> None:
        check_sentences(self.clip, names, self.templates)

    def allocate(self, names: Sequence[str]) -> None:
        self.sentences[self.old :] = encode_sentences(self.clip, names, self.templates)
        adapter = Adapter(self.dim).to(self.device).requires_grad_(False)
        adapter.start_from(self.sentences)
        self.adapters.append(adapter)

    def learn_task(self, task: Task) -> None:
        """Stage 1 on D_k ∪ memory; stage 2, from the second task on, on the exemplars of all classes alone."""
        new, new_labels = task.pictures.features, task.pictures.labels
        features, labels = self.memory.join(new, new_labels)
        self.memory.add(new, new_labels)
        trained = [*self.attention.parameters(), *self.adapters[-1].parameters()]
        self.fit("train", trained, features, labels, self.config.train, len(self.sizes) - 1)
        if len(self.sizes) > 1 and len(self.memory):
            self.attention.eval()  # frozen from here on, dropout too
            adapters = list(self.adapters.parameters())
            self.fit("balance", adapters, self.memory.features, self.memory.labels, self.config.balance, 0)

    def fit(
        self, stage: str, trained: list[nn.Parameter], features: Tensor, labels: Tensor, how: Training, first: int
    ) -> None:
        """Train on rows of raw features; KL and L_lang are those of the tasks from `first` on."""
        unit = normalize(features, dim=-1)

        def loss(rows: Tensor) -> Tensor:
            hidden = self.hidden(unit[rows])
            spreads = self.spreads(hidden)
            mean, deviation = self.mean_scores(unit[rows], hidden), self.score_deviations(unit[rows], spreads)
            draws = torch.randn(self.config.samples, *mean.shape, device=mean.device)
            scores = mean + deviation * draws  # (M, B, C)
            value = cross_entropy(scores.flatten(0, 1), labels[rows].repeat(self.config.samples))
            return value + self.regulariser(hidden, spreads, first)

        self.trainer.fit(stage, trained, len(labels), loss, how)

    def regulariser(self, hidden: Tensor, spreads: Sequence[Tensor], first: int) -> Tensor:
        """Σ over the tasks from `first` on of kl · KL + language · L_lang, each taken within its task."""
        value = hidden.new_zeros(())
        texts = torch.split(self.sentences.mean(1), self.sizes)
        for text, (adapter, part), spread in list(zip(texts, self.by_task(hidden), spreads, strict=True))[first:]:
            mean = adapter.mean(part)
            language = language_loss(text, mean, spread, self.config.samples)
            kl = 0.5 * (spread.square() + mean.square() - 1 - 2 * spread.log()).sum(-1).mean()  # to N(0, I)
            value = value + self.config.kl * kl + self.config.language * language
        return value

    def hidden(self, unit: Tensor) -> Tensor:
        """h of all classes seen for unit features (B, d); (C, B, d), so that the rows of a task lie together."""
        texts = ensemble(self.sentences)
        sizes = torch.tensor(self.sizes, device=texts.device)
        tasks = torch.repeat_interleave(torch.arange(len(sizes), device=texts.device), sizes)
        around: Tensor = self.attention(texts, tasks[:, None] != tasks, unit)
        return texts[:, None] + around

    def by_task(self, hidden: Tensor) -> list[tuple[Adapter, Tensor]]:
        """The adapter of each task, with its classes' part of h (C, B, d)."""
        parts = zip(self.adapters, torch.split(hidden, self.sizes), strict=True)
        return [(cast(Adapter, adapter), part) for adapter, part in parts]

    def spreads(self, hidden: Tensor) -> list[Tensor]:
        """σ(h) of h (C, B, d), task by task."""
        return [adapter.deviation(part) for adapter, part in self.by_task(hidden)]

    def mean_scores(self, unit: Tensor, hidden: Tensor) -> Tensor:
        """Mean of the scores over z, s·v̂·(h + μ), (B, C), for unit features (B, d) and their h (C, B, d)."""
        scores = [adapter.project(unit, part) for adapter, part in self.by_task(hidden)]
        return self.clip.scale * torch.cat(scores, dim=1)

    def score_deviations(self, unit: Tensor, spreads: Sequence[Tensor]) -> Tensor:
        """Standard deviation of the scores over z, s·√(Σ v̂² σ²), (B, C)."""
        variance = torch.einsum("bd,cbd->bc", unit.square(), torch.cat(list(spreads)).square())
        return self.clip.scale * variance.sqrt()

    def logits(self, batch: Batch) -> Tensor:
        unit = normalize(batch.features, dim=-1)
        noise = self.test_noise() if self.config.test_samples else None
        size = max(1, LARGEST_TENSOR // (self.seen * max(self.config.hidden, unit.shape[1])))
        return torch.cat([self._logits(part, noise) for part in torch.split(unit, size)])

    def _logits(self, unit: Tensor, noise: Tensor | None) -> Tensor:
        hidden = self.hidden(unit)
        scores = self.mean_scores(unit, hidden)
        if noise is None:
            return scores
        drawn = torch.cat(self.spreads(hidden)) * noise[:, None]
        return scores + self.clip.scale * torch.einsum("bd,cbd->bc", unit, drawn)

    def test_noise(self) -> Tensor:
        """Mean of the test samples' standard normal draws, (C, d). A task's draws depend on its place alone, so they
        are the same in every batch and whatever tasks come later."""
        count, dim, draws = self.config.test_samples, self.dim, []
        for task, size in enumerate(self.sizes):
            generator = torch.Generator().manual_seed(self.config.test_seed + task)
            draws.append(torch.randn(count, size, dim, generator=generator).mean(0))
        return torch.cat(draws).to(self.device)


def language_loss(texts: Tensor, mean: Tensor, spread: Tensor, samples: int) -> Tensor:
    """CE with logits S[c, c'] = mean over templates and samples of text_c·z_c', target c' = c.

    Texts (C, d) are means over templates. A mean of M samples is one draw of N(μ, σ²/M); it is drawn for every picture.
    """
    residual = mean + spread * torch.randn_like(spread) / math.sqrt(samples)  # (C, B, d)
    scores = torch.einsum("cd,ebd->bce", texts, residual)
    target = torch.arange(len(texts), device=texts.device).repeat(len(scores))
    return cross_entropy(scores.flatten(0, 1), target)

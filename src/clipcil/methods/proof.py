"""PROOF (https://arxiv.org/abs/2305.19270): projections of pictures and texts for every task, fused by attention.

    z(x) = Σ_b W_b v(x),    w_c = Σ_b U_b t_c,    p_c = Σ_b W_b (mean unit feature of class c),    b over tasks
    loss = clip(ẑ, ŵ) + CE(z̃·w̃ᵀ) + CE(z̃·p̃ᵀ),    score = z·ŵ + z̃·w̃ + z̃·p̃

A tilde marks outputs of `Fusion` on [ẑ; ŵ; p̂; context prompts]; they come from a LayerNorm, so their products have no
temperature. ŵ is averaged over all templates; training uses the first template.

Read at zhoudw-zdw/PROOF, commit 0bb2052; `docs/baselines.md` lists what differs and compares whole runs. Where that
code differs from its description, we follow the code, and an option selects the description.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, normalize

from clipcil.data.reader import Batch
from clipcil.data.tasks import Task
from clipcil.memory.exemplars import Budget, ExemplarMemory
from clipcil.methods.base import LARGEST_TENSOR, Method
from clipcil.methods.registry import register
from clipcil.prompts.templates import check_sentences, raw_sentences
from clipcil.settings import options
from clipcil.training.cpu import draw_kept, keep_share
from clipcil.training.losses import clip_loss
from clipcil.training.trainer import Training

IN_CACHE = 2**17
"""Elements of a tensor that fits into the cache of a CPU together with two others of its size."""


@options
class PROOFConfig:
    """Defaults: the authors' values for CIFAR-100. Values for other datasets are in the presets."""

    train: Training = Training(
        epochs=5, lr=1e-3, batch_size=64, optimizer="sgd", weight_decay=0.05, schedule="cosine-epoch"
    )
    """Training of projections, context prompts, fusion and temperature."""
    context: NonNegativeInt = 3
    """Number of context prompts that a task adds to the fusion."""
    dropout: Annotated[float, Field(ge=0, le=0.99)] = 0.1
    """Dropout of the attention weights and after the output layer of the fusion."""
    train_old_text_projections: bool = True
    """Train the text projections of old tasks further, as in the authors' code; off: freeze them, as they describe."""
    raw_feature_at_test: bool = True
    """Fuse the projected picture unnormalised at test, as in the authors' code; off: at unit length, as in training."""
    memory: Budget = Budget()
    """Exemplars, chosen by herding."""


class Fusion(nn.Module):
    """One-headed self-attention over [z; shared tokens], then a residual and LayerNorm, for many pictures at once.

        y = LayerNorm(x + fc(softmax(q kᵀ/√d) v))

    The shared tokens are the same for all pictures, and only one key differs. With Z_i = Σ_j exp(q_i·k_j/√d) over the
    shared keys and O_i their attention output, token i of a picture with key k_z and value v_z has the output

        (1 − α) O_i + α v_z,    α = sigmoid(q_i·k_z/√d − log Z_i),

    exactly: nothing of size (pictures × tokens × d²) is computed. Dropout is applied where the authors have it, to the
    attention weights and after fc, except that the weights among shared tokens have the same mask for the whole batch.
    All four matrices are initialised from Xavier's normal distribution, as the authors'. Only the products of the fused
    tokens with the fused picture are needed, so these are returned; `TokenScores` computes them.
    """

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        for layer in (self.query, self.key, self.value, self.out):
            nn.init.xavier_normal_(layer.weight)

    def forward(self, pictures: Tensor, shared: Tensor, wanted: int) -> Tensor:
        """Pictures (B, d), shared tokens (N, d) → products of each fused picture with the first `wanted` tokens fused
        with it, (B, wanted)."""
        scale = 1 / math.sqrt(pictures.shape[1])
        keys, values = self.key(shared), self.value(shared)  # (N, d)
        own_keys, own_values = self.key(pictures), self.value(pictures)  # (B, d)
        queries, own_queries = self.query(shared[:wanted]) * scale, self.query(pictures) * scale

        own_scores = torch.cat([own_queries @ keys.T, (own_queries * own_keys).sum(1, keepdim=True)], 1)  # (B, N+1)
        own_weights = self.dropout(own_scores.softmax(1))
        attended = own_weights[:, :-1] @ values + own_weights[:, -1:] * own_values
        fused = self.norm(pictures + self.dropout(self.out(attended)))

        scores = queries @ keys.T  # (wanted, N)
        alpha = torch.sigmoid(own_keys @ queries.T - scores.logsumexp(1))  # (B, wanted)
        among = self.out(self.dropout(scores.softmax(1)) @ values)  # (wanted, d)
        own = linear(own_values, self.out.weight)  # fc's bias is in `among`, and the weights add up to one
        parts = (fused, shared[:wanted], among, own, alpha, self.dropout(alpha), self.out.bias)
        norm, share = self.norm, self.dropout.p if self.training else 0.0
        with torch.autocast(pictures.device.type, enabled=False):  # backward does not know of mixed precision
            given = [*(part.to(norm.weight.dtype) for part in parts), norm.weight, norm.bias]
            found: Tensor = TokenScores.apply(norm.eps, share, *given)  # type: ignore[no-untyped-call]
        return found


class TokenScores(torch.autograd.Function):
    """z_b · LayerNorm(x_n + dropout(m_n + α_bn (c − m_n) + α̃_bn p_b)) for pictures b and tokens n.

    Autograd would keep a dozen tensors of (B, N, d) numbers and spend its time on moving them. Here a few pictures are
    taken at a time, so that their (b, N, d) numbers stay in the processor's cache; backward computes them again. With
    ŷ what LayerNorm gives before its weight γ and bias β, r its factor and w = γ ⊙ z, the gradient of a score with
    regard to LayerNorm's input is r (w − mean(w) − ŷ mean(w ⊙ ŷ)).
    """

    @staticmethod
    def forward(ctx: Any, eps: float, share: float, *given: Tensor) -> Tensor:
        """z (B, d), x (N, d), m (N, d), p (B, d), α and α̃ (B, N), c, γ and β (d,) → (B, N)."""
        fused, tokens, _, _, alpha, _, _, weight, bias = given
        ctx.eps, ctx.share = eps, share
        most = IN_CACHE if fused.device.type == "cpu" else LARGEST_TENSOR
        ctx.size = max(1, most // max(1, tokens.numel()))
        ctx.kept = []
        scaled, found = fused * weight, []
        for start in range(0, len(fused), ctx.size):
            part = slice(start, start + ctx.size)
            ctx.kept.append(draw_kept((*alpha[part].shape, fused.shape[1]), share, fused.device) if share else None)
            normed, _ = TokenScores.normed(ctx, part, ctx.kept[-1], given)
            found.append((normed @ scaled[part, :, None])[..., 0])
        products = torch.cat(found) if found else torch.zeros_like(alpha)
        ctx.save_for_backward(*given, products)
        return products + fused @ bias[:, None]

    @staticmethod
    def normed(ctx: Any, part: slice, kept: Tensor | None, given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """ŷ (b, N, d) and r (b, N, 1) of a part of the pictures; `given` is what `forward` was given."""
        _, tokens, among, own, alpha, dropped, centre, _, _ = given
        mixed = torch.addcmul(among, alpha[part, :, None], centre - among)
        mixed = mixed.addcmul_(dropped[part, :, None], own[part, None])
        if kept is not None:
            mixed = mixed.mul_(kept).mul_(1 / keep_share(ctx.share))
        normed, _, scale = torch.native_layer_norm(mixed.add_(tokens), [tokens.shape[1]], None, None, ctx.eps)
        return normed, scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *given, products = ctx.saved_tensors
        fused, tokens, among, own, alpha, dropped, centre, weight, bias = given
        gradient, dim = gradients[0], fused.shape[1]
        of_fused, of_own = torch.empty_like(fused), torch.empty_like(own)
        of_tokens, of_among, of_centre = torch.zeros_like(tokens), torch.zeros_like(among), torch.zeros_like(centre)
        of_alpha, of_dropped = torch.empty_like(alpha), torch.empty_like(dropped)
        scaled = fused * weight
        centred = scaled - scaled.mean(1, keepdim=True)
        for kept, start in zip(ctx.kept, range(0, len(fused), ctx.size), strict=True):
            part = slice(start, start + ctx.size)
            normed, scale = TokenScores.normed(ctx, part, kept, tuple(given))
            of_fused[part] = (gradient[part, None] @ normed)[:, 0]
            inside = normed.mul_(products[part, :, None] / -dim).add_(centred[part, None])
            inside = inside.mul_(gradient[part, :, None] * scale)  # the gradient of LayerNorm's input, (b, N, d)
            of_tokens += inside.sum(0)
            if kept is not None:
                inside = inside.mul_(kept).mul_(1 / keep_share(ctx.share))
            of_alpha[part] = (inside * (centre - among)).sum(-1)
            of_dropped[part] = (inside @ own[part, :, None])[..., 0]
            of_own[part] = (dropped[part, None] @ inside)[:, 0]
            of_centre += (alpha[part].reshape(1, -1) @ inside.reshape(-1, dim))[0]
            of_among += inside.mul_(1 - alpha[part, :, None]).sum(0)
        total = gradient.sum(1, keepdim=True)
        of_weight, of_bias = (fused * of_fused).sum(0), (fused * total).sum(0)
        of_fused = of_fused * weight + total * bias
        return None, None, of_fused, of_tokens, of_among, of_own, of_alpha, of_dropped, of_centre, of_weight, of_bias


@register
class PROOF(Method):
    name = "proof"
    title = "PROOF"
    Config = PROOFConfig
    keeps = "exemplars, class means"
    keeps_exemplars = True
    config: PROOFConfig
    sentences: Tensor  # (C, T, dim): raw texts of all templates
    prototypes: Tensor  # (C, dim): mean unit feature of each class
    tokens: Tensor  # (2C + contexts, dim): ŵ, p̂ and the context prompts as they stand after the last task

    def build(self) -> None:
        self.memory = ExemplarMemory(self.dim, self.config.memory)
        self.image_projections, self.text_projections = nn.ModuleList(), nn.ModuleList()  # a task each
        self.contexts = nn.ParameterList()  # a task each: (context, dim)
        self.fusion = Fusion(self.dim, self.config.dropout).requires_grad_(False)
        self.logit_scale = nn.Parameter(self.clip.logit_scale.detach().clone(), requires_grad=False)
        self.growing_buffer("sentences", len(self.templates), self.dim, persistent=False)
        self.growing_buffer("prototypes", self.dim)
        self.register_buffer("tokens", torch.zeros(0, self.dim, device=self.device))

    def check_names(self, names: Sequence[str]) -> None:
        check_sentences(self.clip, names, self.templates)

    def allocate(self, names: Sequence[str]) -> None:
        for projections in (self.image_projections, self.text_projections):
            projections.append(nn.Linear(self.dim, self.dim).to(self.device).requires_grad_(False))
        context = torch.randn(self.config.context, self.dim, device=self.device)
        self.contexts.append(nn.Parameter(context, requires_grad=False))
        self.sentences[self.old :] = raw_sentences(self.clip, names, self.templates)
        self.tokens = self.tokens.new_zeros(2 * self.seen + self.config.context * len(self.sizes), self.dim)

    def learn_task(self, task: Task) -> None:
        new, new_labels = task.pictures.features, task.pictures.labels
        groups = self.by_new_class(normalize(new, dim=-1), new_labels)
        self.prototypes[self.old :] = torch.stack([group.mean(0) for group in groups])
        features, labels = self.memory.join(new, new_labels)
        texts = self.text_projections if self.config.train_old_text_projections else self.text_projections[-1:]
        trained = [p for module in (self.image_projections[-1], *texts, self.fusion) for p in module.parameters()]

        def loss(rows: Tensor) -> Tensor:
            pictures = normalize(project(features[rows], self.image_projections), dim=-1)
            tokens = self.shared_tokens(self.sentences[:, :1])
            matching = clip_loss(self.logit_scale.exp() * pictures @ tokens[: self.seen].T, labels[rows])
            by_text, by_prototype = self.fusion(pictures, tokens, 2 * self.seen).split(self.seen, dim=1)
            return matching + cross_entropy(by_text, labels[rows]) + cross_entropy(by_prototype, labels[rows])

        trained += [self.contexts[-1], self.logit_scale]
        self.trainer.fit("train", trained, len(labels), loss, self.config.train)
        self.eval()  # the stored tokens are made without dropout
        with torch.no_grad():
            self.tokens = self.shared_tokens(self.sentences)
        self.memory.add(new, new_labels)

    def shared_tokens(self, sentences: Tensor) -> Tensor:
        """ŵ from sentences (C, T, dim): projected, normalised, averaged, normalised; then p̂, then the prompts."""
        texts = normalize(normalize(project(sentences, self.text_projections), dim=-1).mean(1), dim=-1)
        prototypes = normalize(project(self.prototypes, self.image_projections), dim=-1)
        return torch.cat([texts, prototypes, *self.contexts])

    def logits(self, batch: Batch) -> Tensor:
        projected = project(batch.features, self.image_projections)
        size = max(1, LARGEST_TENSOR // self.tokens.numel())
        found = []
        for part in torch.split(projected, size):
            inside = part if self.config.raw_feature_at_test else normalize(part, dim=-1)
            fused = self.fusion(inside, self.tokens, 2 * self.seen)  # with texts, then with prototypes
            found.append(part @ self.tokens[: self.seen].T + fused[:, : self.seen] + fused[:, self.seen :])
        return torch.cat(found)


def project(features: Tensor, projections: nn.ModuleList) -> Tensor:
    """Σ_b (W_b x + c_b), the sum taken before the product: one d×d product however many tasks there are."""
    weight = torch.stack([layer.weight for layer in projections]).sum(0)  # type: ignore[misc]
    bias = torch.stack([layer.bias for layer in projections]).sum(0)  # type: ignore[misc]
    return linear(features, weight, bias)

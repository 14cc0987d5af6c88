"""S10: a training step of three methods on features: as their authors' code computes it, and ours.

CLAP4CLIP: a decoder layer for every picture and class, or its MLP's first layer of texts and pictures apart. PROOF:
self-attention over the sequence of every picture, or one key more for tokens that all pictures share. CoOp: every
prompt through the text tower, or their common beginning once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from benchmarks.harness import Row, alternate, difference, versus
from benchmarks.shapes import names
from clipcil.clip import load_clip
from clipcil.methods.clap4clip import VisualGuidedAttention
from clipcil.methods.proof import Fusion
from clipcil.prompts.text import PromptTexts, encode_prompts, encode_shared

Scores = Callable[[], Tensor]


def compare(what: str, theirs: Scores, ours: Scores, trained: Sequence[nn.Parameter], module: nn.Module) -> Row:
    """Forward and backward of both, with dropout; what both give is compared without it."""
    with torch.no_grad():
        module.eval()
        error = difference(ours(), theirs())
        module.train()
    labels = torch.arange(len(ours())) % ours().shape[1]

    def step(scores: Scores) -> Callable[[], object]:
        return lambda: torch.autograd.grad(cross_entropy(scores(), labels), trained, allow_unused=True)

    seconds = alternate({"theirs": step(theirs), "ours": step(ours)}, 5)
    return versus("S10", what, seconds, error=error, tolerance=1e-5)


def clap4clip(batch: int, classes: int, dim: int) -> Row:
    attention = VisualGuidedAttention(dim, 4 * dim, 0.1)
    texts, pictures = normalize(torch.randn(classes, dim), dim=-1), normalize(torch.randn(batch, dim), dim=-1)
    tasks = torch.arange(classes) // 10
    blocked = tasks[:, None] != tasks

    def theirs() -> Tensor:
        around = attention.layer(texts.expand(batch, -1, -1), pictures[:, None], tgt_mask=blocked)
        return torch.einsum("bd,bcd->bc", pictures, around)

    def ours() -> Tensor:
        return torch.einsum("bd,cbd->bc", pictures, attention(texts, blocked, pictures))

    what = f"CLAP4CLIP: attention of {classes} classes to each of {batch} pictures, with its gradient"
    return compare(what, theirs, ours, list(attention.parameters()), attention)


def proof(batch: int, classes: int, dim: int) -> Row:
    fusion = Fusion(dim, 0.1)
    pictures, shared = normalize(torch.randn(batch, dim), dim=-1), normalize(torch.randn(2 * classes + 30, dim), dim=-1)

    def theirs() -> Tensor:
        tokens = torch.cat([pictures[:, None], shared.expand(batch, -1, -1)], 1)
        scores = fusion.query(tokens) @ fusion.key(tokens).transpose(1, 2) / math.sqrt(dim)
        mixed = fusion.out(fusion.dropout(scores.softmax(-1)) @ fusion.value(tokens))
        fused = fusion.norm(tokens + fusion.dropout(mixed))
        return torch.einsum("bd,bnd->bn", fused[:, 0], fused[:, 1 : 1 + 2 * classes])

    what = f"PROOF: fusion of {batch} pictures with {2 * classes} texts and prototypes, with its gradient"
    return compare(what, theirs, lambda: fusion(pictures, shared, 2 * classes), list(fusion.parameters()), fusion)


def coop(batch: int, classes: int) -> Row:
    clip = load_clip("mini").requires_grad_(False)
    texts = PromptTexts(clip, names(classes), 16, ".")
    context = nn.Parameter(torch.randn(1, 16, clip.config.text.width) * 0.02)
    pictures = normalize(torch.randn(batch, clip.config.dim), dim=-1)
    what = f"CoOp: the texts of {classes} classes with a context of 16, with its gradient"
    return compare(
        what,
        lambda: pictures @ encode_prompts(clip, [texts(context)]).T,
        lambda: pictures @ encode_shared(clip, texts, context).T,
        [context],
        clip,
    )


def run(quick: bool) -> list[Row]:
    torch.manual_seed(0)
    batch, classes, dim = (4, 20, 32) if quick else (32, 100, 384)
    return [clap4clip(batch, classes, dim), proof(batch, classes, dim), coop(batch, classes)]

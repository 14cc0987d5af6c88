"""The text tower, distilled: features of texts approach their targets, and so do the similarities in a batch."""

import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from clipcil.clip.config import TextConfig
from clipcil.clip.text import TextTower
from clipcil.clip.tokenizer import Tokenizer
from clipcil.errors import UserError
from reproduce.mini.fitting import fit
from reproduce.mini.texts import TEMPLATES, Corpus

CONFIG = TextConfig(192, 4, 3, 768, "gelu", vocab=8192, context=48, bos=0, eos=1, pad=1)
BATCH = 256
RATE = 1.5e-3


def start(config: TextConfig, dim: int, words: Tensor, seed: int) -> TextTower:
    """A tower whose token embeddings hold the teacher's embedding of each token (`words`, (vocab, dim))."""
    torch.manual_seed(seed)
    tower = TextTower(config, dim)
    for name, weight in tower.named_parameters():
        if weight.dim() == 2 and "embedding" not in name:
            torch.nn.init.normal_(weight, std=config.width**-0.5 * (0.5 if "out_proj" in name or "fc2" in name else 1))
        elif "bias" in name:
            torch.nn.init.zeros_(weight)
    centred = words - words.mean(0)
    axes = torch.linalg.svd(centred, full_matrices=False)[2][: config.width]
    embeddings = tower.text_model.embeddings
    embeddings.token_embedding.weight.data = 0.5 * F.normalize(centred @ axes.T, dim=-1) * config.width**0.5
    torch.nn.init.normal_(embeddings.position_embedding.weight, std=0.02)
    tower.text_projection.weight.data = axes.T.contiguous() / config.width**0.5
    return tower


def loss(features: Tensor, targets: Tensor) -> Tensor:
    """1 − cosine, plus the KL divergence between the rows of the two similarity matrices."""
    features = F.normalize(features, dim=-1)
    rows = F.log_softmax(20 * features @ targets.T, dim=-1)
    wanted = F.softmax(20 * targets @ targets.T, dim=-1)
    return (1 - (features * targets).sum(-1)).mean() + 0.2 * F.kl_div(rows, wanted, reduction="batchmean")


class Draw:
    """Batches of texts and targets: names bare or in templates, classes of the pictures more often, sentences."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> None:
        self._corpus, self._rng = corpus, random.Random(seed)
        self._short = [index for index, text in enumerate(corpus.sentences) if _fits(tokenizer, text)]
        often = set(corpus.often)
        self._often = [index for index, name in enumerate(corpus.names) if name in often]

    def __call__(self, count: int) -> tuple[list[str], Tensor]:
        corpus, rng = self._corpus, self._rng
        texts, targets = [], []
        for _ in range(count):
            which = rng.random()
            if which < 0.2:
                at = rng.choice(self._short)
                texts.append(corpus.sentences[at])
                targets.append(corpus.sentence_targets[at])
                continue
            at = rng.choice(self._often) if which < 0.35 else rng.randrange(len(corpus.names))
            name = corpus.names[at]
            texts.append(name if rng.random() < 0.3 else rng.choice(TEMPLATES).format(name))
            targets.append(corpus.name_targets[at])
        return texts, torch.stack(targets)


def _fits(tokenizer: Tokenizer, text: str) -> bool:
    try:
        tokenizer([text])
    except UserError:  # longer than the context
        return False
    return True


def train(tower: TextTower, tokenizer: Tokenizer, draw: Draw, steps: int, save: Path) -> None:
    """Train for `steps`; the averaged weights are saved and kept."""

    def losses() -> dict[str, Tensor]:
        texts, targets = draw(BATCH)
        ids, ends = tokenizer(texts)
        order = torch.argsort(ends)
        features = []
        for rows in order.chunk(4):  # batches of similar length need little padding
            length = int(ends[rows].max()) + 1
            features.append(tower(tower.embed(ids[rows, :length]), ends[rows]))
        return {"loss": loss(torch.cat(features), targets[order])}

    fit(tower, RATE, 0.998, steps, save, losses, {"loss": 1.0})

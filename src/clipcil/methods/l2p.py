"""L2P, "Learning to Prompt for Continual Learning", on CLIP's vision tower.

https://arxiv.org/abs/2112.08654

A pool of N prompts P_i (L tokens each) with keys k_i is shared by all tasks. A picture with query q(x), its feature
from the frozen tower without prompts, gets the prompts of its `top_k` nearest keys S(x), and a linear head reads the
prompted pass f:

    loss = CE(head(f(x; P_S)), y; classes of the current task) − λ · Σ_{i∈S} cos(q(x), k_i)

Trained: prompts, keys, head. Frozen: the tower. Kept of old pictures: nothing.

Where implementations and paper differ:
- In the published code a batch votes on its prompts, in training and at test. Here they are chosen for each picture
  (the paper's Eq. for S(x)); `vote_in_training` restores the vote for training only.
- The head reads the mean of the prompt tokens in the original and the class token in its CLIP port; see `head_input`.
- A CLIP port masks the pool by task and adds exemplars; neither is L2P.

Read at google-research/l2p, commit dd8836e, and JH-LEE-KR/l2p-pytorch, commit f7bc994.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import cross_entropy

from clipcil.data.reader import Batch, Pictures
from clipcil.data.tasks import Task
from clipcil.distributed import spread
from clipcil.errors import UserError
from clipcil.heads.linear import GrowingHead
from clipcil.methods.base import Method
from clipcil.methods.registry import register
from clipcil.prompts.visual import check_range, choose, cosine, uniform
from clipcil.settings import options
from clipcil.training.augment import TowerTraining, training_inputs


@options
class L2PConfig:
    train: TowerTraining = field(
        default_factory=lambda: TowerTraining(
            epochs=5, lr=0.015, batch_size=128, optimizer="adam", weight_decay=0, schedule="constant", clip_norm=1
        )
    )
    """The authors' values on CIFAR-100: Adam at a constant 0.03 × batch / 256, where 16 pictures on each of 8 devices
    make a batch of 128; 5 epochs, gradients clipped to norm 1. The single-GPU port has batches of 16, hence 0.001875.
    Both crop and flip the pictures (`augment`)."""
    pool: int = 10
    """N, number of prompts in the pool; as in the authors' code and the ports."""
    length: PositiveInt = 10
    """L, tokens of a prompt; the authors' value on CIFAR-100. The ports have 5."""
    top_k: PositiveInt = 4
    """Prompts selected for a picture; the authors' value on CIFAR-100. The ports have 5."""
    pull: NonNegativeFloat = 1.0
    """λ; the authors' value. The ports have 0.1. Keys get no other gradient, so with Adam the size matters little."""
    prompt_range: tuple[float, ...] = (0.0, 0.01)
    """Prompts are initialised from U[low, high); the authors' range. The PyTorch ports have (−1, 1). The range matters
    although a layer norm follows: at rate lr a step of Adam is a larger part of a small prompt."""
    key_range: tuple[float, ...] = (0.0, 0.01)
    """Keys are initialised from U[low, high); the authors' range. The PyTorch ports have (−1, 1). The cosine ignores a
    key's length, but a key of size r takes about r/lr steps of Adam to turn: with few pictures it must be small."""
    head_input: Literal["class", "prompts"] = "class"
    """What the head reads. class: the projected class token, the only output that CLIP's training used, as the CLIP
    port does; prompts: the mean of the prompt tokens after the last norm, as in the original. On CLIP the latter reads
    tokens that no training loss has used, and needs the whole of the last layer."""
    vote_in_training: bool = False
    """Whether a training batch votes on one set of prompts, as the published code does. Never at test time."""

    def __post_init__(self) -> None:
        check_range("prompt_range", self.prompt_range)
        check_range("key_range", self.key_range)
        if self.pool < self.top_k:
            raise UserError(f"setting 'pool' is {self.pool}; it must be at least top_k, which is {self.top_k}")


@register
class L2P(Method):
    name = "l2p"
    title = "L2P"
    Config = L2PConfig
    keeps = "prompts"
    config: L2PConfig

    def build(self) -> None:
        dim, width, device = self.dim, self.clip.config.vision.width, self.device
        self.prompts = uniform(
            self.config.pool, self.config.length, width, between=self.config.prompt_range, device=device
        )
        self.keys = uniform(self.config.pool, dim, between=self.config.key_range, device=device)
        self.head = GrowingHead(dim if self.config.head_input == "class" else width, device)

    def allocate(self, names: Sequence[str]) -> None:
        self.head.grow(len(names))

    def learn_task(self, task: Task) -> None:
        labels, queries = task.pictures.labels - self.old, task.pictures.features
        augment = self.config.train.augment

        def loss(rows: Tensor, batch: Pictures) -> Tensor:
            pixels, query = training_inputs(self.clip.vision, batch.pixels, queries[rows], augment)
            similarity = cosine(query, self.keys)  # (B, N)
            chosen = choose(similarity, self.config.top_k, together=self.config.vote_in_training)
            features = spread(self.encode, pixels, chosen)
            near = similarity.gather(1, chosen).sum(1).mean()
            return cross_entropy(self.head.current(features), labels[rows]) - self.config.pull * near

        parameters = [self.prompts, self.keys, *self.head.newest()]
        self.trainer.fit("train", parameters, task.pictures, loss, self.config.train)

    def notes(self) -> list[str]:
        return self.head.notes()

    def logits(self, batch: Batch) -> Tensor:
        chosen = choose(cosine(batch.features, self.keys), self.config.top_k)
        scores: Tensor = self.head(self.encode(batch.pixels, chosen))
        return scores

    def encode(self, pixels: Tensor, chosen: Tensor) -> Tensor:
        """The prompted pass: pictures with the prompts `chosen` (B, k) for them → what the head reads."""
        tokens = self.prompts[chosen].flatten(1, 2)  # (B, k·L, width)
        tower = self.clip.vision
        if self.config.head_input == "class":
            features: Tensor = tower(pixels, extra_tokens=tokens, class_only=True).features  # (B, dim)
            return features
        outputs = tower(pixels, extra_tokens=tokens).tokens[:, 1 : 1 + tokens.shape[1]]
        mean: Tensor = tower.vision_model.post_layernorm(outputs).mean(dim=1)  # (B, width)
        return mean

"""L2P (https://arxiv.org/abs/2112.08654): a pool of prompts; each picture gets the prompts with the nearest keys.

All tasks share N prompts P_i of L tokens, with keys k_i. A picture with query q(x), its feature from the frozen tower,
gets the prompts of its `top_k` nearest keys S(x), and a linear head reads f, the output of the prompted tower:

    loss = CE(head(f(x; P_S)), y; classes of the current task) − λ · Σ_{i∈S} cos(q(x), k_i)

Prompts, keys and head are trained. Read at google-research/l2p, commit dd8836e, and its port JH-LEE-KR/l2p-pytorch,
commit f7bc994. There a batch votes on its prompts, also at test; here they are chosen for each picture.
"""

from collections.abc import Sequence
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
from clipcil.prompts.visual import Range, choose, cosine, uniform
from clipcil.settings import options
from clipcil.training.augment import TowerTraining, training_inputs


@options
class L2PConfig:
    """The defaults are the authors' values on CIFAR-100."""

    train: TowerTraining = TowerTraining(
        epochs=5, lr=0.015, batch_size=128, optimizer="adam", weight_decay=0, schedule="constant", clip_norm=1
    )
    """Training of prompts, keys and head: Adam at a constant 0.03 × batch / 256."""
    pool: int = 10
    """N, number of prompts in the pool."""
    length: PositiveInt = 10
    """L, tokens of a prompt."""
    top_k: PositiveInt = 4
    """Number of prompts selected for a picture."""
    pull: NonNegativeFloat = 1.0
    """λ, weight of the cosines of query and keys. Keys have no other gradient, so with Adam it matters little."""
    prompt_range: Range = (0.0, 0.01)
    """Prompts are initialised from U[low, high); the PyTorch ports have (−1, 1)."""
    key_range: Range = (0.0, 0.01)
    """Keys are initialised from U[low, high); a key of size r takes about r/lr steps of Adam to turn."""
    head_input: Literal["class", "prompts"] = "class"
    """What the head reads. class: the class token (CLIP port); prompts: the mean prompt token (published)."""
    vote_in_training: bool = False
    """Whether a training batch votes on one set of prompts, as in the published code."""

    def __post_init__(self) -> None:
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
        size = self.clip.config.vision.width
        self.prompts = uniform(
            self.config.pool, self.config.length, size, between=self.config.prompt_range, device=self.device
        )
        self.keys = uniform(self.config.pool, self.dim, between=self.config.key_range, device=self.device)
        self.head = GrowingHead(self.dim if self.config.head_input == "class" else size, self.device)

    def allocate(self, names: Sequence[str]) -> None:
        self.head.grow(len(names))

    def learn_task(self, task: Task) -> None:
        labels, queries = task.pictures.labels - self.old, task.pictures.features

        def loss(rows: Tensor, batch: Pictures) -> Tensor:
            pixels, query = training_inputs(self.clip.vision, batch.pixels, queries[rows], self.config.train.augment)
            similarity = cosine(query, self.keys)  # (B, N)
            chosen = choose(similarity, self.config.top_k, together=self.config.vote_in_training)
            features = spread(self.encode, pixels, chosen)
            near = similarity.gather(1, chosen).sum(1).mean()
            return cross_entropy(self.head.current(features), labels[rows]) - self.config.pull * near

        parameters = [self.prompts, self.keys, *self.head.newest()]
        self.trainer.fit("train", parameters, task.pictures, loss, self.config.train)

    def logits(self, batch: Batch) -> Tensor:
        chosen = choose(cosine(batch.features, self.keys), self.config.top_k)
        return self.head(self.encode(batch.pixels, chosen))

    def encode(self, pixels: Tensor, chosen: Tensor) -> Tensor:
        """What the head reads of pictures (B, C, H, W), each with its `chosen` prompts (B, k): (B, dim or width)."""
        tokens = self.prompts[chosen].flatten(1, 2)  # (B, k·L, width)
        tower = self.clip.vision
        if self.config.head_input == "class":
            return tower(pixels, extra_tokens=tokens, class_only=True).features
        outputs = tower(pixels, extra_tokens=tokens).tokens[:, 1 : 1 + tokens.shape[1]]
        return tower.vision_model.post_layernorm(outputs).mean(dim=1)

    def notes(self) -> list[str]:
        return self.head.notes()

"""RanPAC (https://arxiv.org/abs/2307.02251): ridge regression on random ReLU features of a frozen tower.

    φ(x) = ReLU(Wᵀ h(x)),    G = Σ φφᵀ,    Q = Σ φ e_yᵀ,    scores = φ(x)ᵀ (G + λ I)⁻¹ Q

h is the class token before CLIP's projection, not normalised. W is drawn once and never trained; G and Q are sums, so
learning in tasks gives what all pictures at once would give. `ranpac` is the paper's variant without its first phase;
in `ranpac-adapted` the tower is adapted to the first task, and then frozen.

To choose λ, the paper's code holds out the last fifth of a task in the order of its loader; here the pictures are
shuffled.

Examples:
    >>> import clipcil
    >>> experiment = clipcil.Experiment("ranpac", data="emoji", tasks=10, projections=500)
    >>> for task in experiment:
    ...     experiment.learn(task)
    >>> experiment.evaluate().last
    76.5
"""

from dataclasses import field
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, one_hot

from clipcil.data.reader import Batch, Pictures
from clipcil.data.tasks import Task
from clipcil.distributed import spread
from clipcil.errors import UserError
from clipcil.heads.stacked import mix
from clipcil.methods.base import Method
from clipcil.methods.registry import register
from clipcil.settings import options
from clipcil.training.augment import TowerTraining, augmented
from clipcil.training.tuning import tuned

PENALTIES = tuple(10.0**power for power in range(-8, 9))
"""λ to choose from, as in the paper's code."""
SHARPNESS = 20.0
"""Factor of the scores until it can be fitted; fitted to six pictures per class it is 15 to 37 on emoji."""


@options
class RanPACConfig:
    projections: NonNegativeInt = field(default=0, metadata={"in_checks": 64})
    """M, the number of random features; 0: eight for each dimension of the tower (the paper: thirteen). Cost: M³."""
    held_out: Annotated[float, Field(ge=0.01, le=0.99)] = 0.2
    """Share of a task's pictures on which λ is chosen, fitted to the rest of the task."""


@options
class RanPACAdaptedConfig(RanPACConfig):
    phase1: TowerTraining = TowerTraining(
        epochs=20, lr=0.01, batch_size=48, weight_decay=5e-4, optimizer="sgd", momentum=0.9, schedule="cosine-epoch"
    )
    """Adapting the tower to the first task; the authors also flip and crop (phase1.augment=crop)."""
    tuned: Literal["lora", "norms", "blocks", "tower"] = "lora"
    """What phase 1 trains; the paper takes the best of adapters, scaling and shifting, and visual prompts."""
    lora_rank: PositiveInt = 8
    """Rank of the update, where tuned=lora."""


@register
class RanPAC(Method):
    name = "ranpac"
    title = "RanPAC"
    Config = RanPACConfig
    keeps = "sums of random features"
    config: RanPACConfig
    directions: Tensor  # (width, M): W
    gram: Tensor  # (M, M): G
    sums: Tensor  # (C, M): Qᵀ
    classifier: Tensor  # (C, M)
    penalty: Tensor  # 0-d: λ as last chosen
    sharpness: Tensor  # 0-d: factor of the scores before a softmax, fitted to the newest task

    def build(self) -> None:
        width = self.clip.config.vision.width
        count = self.config.projections or 8 * width
        self.register_buffer("directions", torch.randn(width, count, device=self.device))
        self.register_buffer("gram", torch.zeros(count, count, dtype=torch.float64, device=self.device))
        self.register_buffer("penalty", torch.ones((), dtype=torch.float64, device=self.device))
        self.register_buffer("sharpness", torch.full((), SHARPNESS, device=self.device))
        self.growing_buffer("sums", count, dtype=torch.float64)
        self.growing_buffer("classifier", count)

    @torch.no_grad()
    def learn_task(self, task: Task) -> None:
        """Choose λ on these pictures, add them to the sums, and solve for the classifier."""
        features, labels = self.expand(task.pictures.pooled), task.pictures.labels
        penalty, sharpness = self.choose_penalty(features, labels)
        self.penalty, self.sharpness = penalty.to(self.penalty), sharpness.to(self.sharpness)
        features = features.double()  # in float32 a small λ would lie below the rounding of G
        self.gram = self.gram + features.T @ features
        self.sums = self.sums.index_add(0, labels, features)
        matrix = self.gram.clone()
        matrix.diagonal().add_(self.penalty)
        self.classifier = solve(matrix, self.sums.T).T.to(self.classifier)

    learn_again = learn_task

    def logits(self, batch: Batch) -> Tensor:
        return self.expand(batch.pooled) @ self.classifier.T

    @property
    def score_scale(self) -> float:
        """A fitted factor: scores estimate 0 and 1, so their plain softmax would be nearly equal for all classes."""
        return float(self.sharpness)

    def expand(self, pooled: Tensor) -> Tensor:
        """(B, width) → (B, M)."""
        return torch.relu(pooled @ self.directions)

    def choose_penalty(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Choose λ by the squared error on a held-out part of this task, fitted to the rest of the task.

        The second number is ours, because the paper has no probabilities: the factor of the scores that makes the
        labels of the held-out part likeliest. A picture is held out only if its class has another one to fit to, or the
        largest λ would always win. Where no picture can be held out, λ and factor do not change.

        One eigenvalue problem serves all λ: of the pictures' inner products K = ΦΦᵀ = U diag(e) Uᵀ, because
        Φ'(ΦᵀΦ + λ I)⁻¹Φᵀ Y = Φ'Φᵀ U (UᵀY / (e + λ)).
        """
        order = torch.randperm(len(features)).to(features.device)
        held = min(len(features) - 1, max(1, round(self.config.held_out * len(features))))  # one is left to fit to
        fit, check = order[held:], order[:held]
        check = check[torch.isin(labels[check], labels[fit])]
        if not len(check):
            return self.penalty, self.sharpness
        fitted, targets = features[fit].double(), one_hot(labels, self.seen).double()
        values, basis = torch.linalg.eigh(fitted @ fitted.T)
        values = values.clamp(min=0)
        across, wanted = features[check].double() @ fitted.T @ basis, basis.T @ targets[fit]
        scores = [across @ (wanted / (values + p)[:, None]) for p in PENALTIES]
        best = torch.stack([(guess - targets[check]).square().mean() for guess in scores]).argmin()
        factor = mix([scores[best]], labels[check])[0].clamp(1, 1000) if self.seen > 1 else self.sharpness
        return torch.tensor(PENALTIES, dtype=torch.float64, device=features.device)[best], factor


@register
class RanPACAdapted(RanPAC):
    """RanPAC with its first phase. The head of that phase, σ cos(h, w_c) over the first task's classes, is dropped."""

    name = "ranpac-adapted"
    title = "RanPAC (first task adapted)"
    Config = RanPACAdaptedConfig
    tunes_tower = True
    config: RanPACAdaptedConfig

    def build(self) -> None:
        super().build()
        self.tower = self.clip.vision

    def learn_task(self, task: Task) -> None:
        if not self.old:
            self.adapt(task)
        self.learn_again(task)

    def adapt(self, task: Task) -> None:
        """Adapt the tower by the cross-entropy of a cosine classifier with a learnt temperature."""
        labels, how, width = task.pictures.labels, self.config.phase1, self.directions.shape[0]
        head = nn.Parameter(torch.empty(self.seen, width, device=self.device).uniform_(-(width**-0.5), width**-0.5))
        scale = nn.Parameter(torch.ones((), device=self.device))

        def loss(rows: Tensor, batch: Pictures) -> Tensor:
            pixels = augmented(batch.pixels, how.augment)
            pooled = spread(lambda part: self.tower(part, class_only=True).pooled, pixels)
            scores = normalize(pooled, dim=-1) @ normalize(head, dim=-1).T
            return cross_entropy(scale * scores, labels[rows])

        with tuned(self.clip, self.config.tuned, rank=self.config.lora_rank) as parameters:
            self.trainer.fit("phase1", [*parameters, head, scale], task.pictures, loss, how)
        if not bool(torch.isfinite(task.pictures.pooled).all()):  # finite weights can still give infinite features
            raise UserError(f"training diverged: the tower's features are not finite; try a phase1.lr below {how.lr:g}")


def solve(matrix: Tensor, targets: Tensor) -> Tensor:
    """matrix⁻¹ targets of a symmetric positive matrix. A λ far below the rounding of G can leave it indefinite; then
    the general solver is used, which the paper's code always uses."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return torch.linalg.solve(matrix, targets) if int(failed) else torch.cholesky_solve(targets, factor)

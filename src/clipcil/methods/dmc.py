"""DMC and DMC-OT: adapt the vision tower, then train text prompts with replay from stored class Gaussians.

Stage 1 adapts the vision tower to frozen hard-prompt texts; stage 2 freezes it and trains soft text prompts over all
classes seen, replaying the old ones from stored Gaussians. DMC-OT also transports the Gaussians when the tower
changes (optimal transport) and adds a task prompt to the class prompts. The ablations of the paper are options.

"Preserving Cross-Modal Consistency for CLIP-based Class-Incremental Learning", arXiv:2511.10974.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Any, Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from clipcil.calibration import CALIBRATIONS, CalibrationName
from clipcil.data.batch import Batch
from clipcil.data.reader import Pictures
from clipcil.data.stream import Task
from clipcil.distributed import spread
from clipcil.memory.gaussians import GaussianMemory
from clipcil.methods.base import Method
from clipcil.methods.registry import register
from clipcil.prompts.templates import check_sentences, encode_classes, fill
from clipcil.prompts.text import PromptTexts, encode_prompts, tokenize_names
from clipcil.settings import options
from clipcil.training.augment import Augment, TowerTraining, augmented
from clipcil.training.loop import Training
from clipcil.training.losses import clip_loss
from clipcil.training.own_random import own_random
from clipcil.training.tuning import Tuned, tuned

NEAREST = 32
"""Number of nearest old classes in the softmax for each replayed class, where it is not over all classes."""


@options
class DMCConfig:
    """Where a setting says "the paper does not say", the value is ours and in the README's table of open points."""

    stage1: TowerTraining = field(default_factory=lambda: TowerTraining(epochs=3, lr=1e-5, weight_decay=1e-4))
    """Adapting the tower. AdamW and batch 32 are the paper's; it gives neither learning rate nor epochs. 1e-5 is common
    practice for fine-tuning the whole of CLIP with AdamW."""
    tuned: Tuned = "tower"
    """What stage 1 trains. The paper says "update only the image encoder", which reads as all of it."""
    tuned_blocks: int = 2
    """How many of the last blocks, where tuned=blocks."""
    lora_rank: PositiveInt = 8
    """Rank of the update, where tuned=lora."""
    template: str = "a photo of {}"
    """The hard prompt of stage 1, as §3.2 writes it."""
    stage2: Training = field(default_factory=lambda: Training(epochs=5, steps=50, lr=2e-3, weight_decay=1e-4))
    """Training the prompts. The paper gives neither learning rate nor epochs. PromptFusion, by the same first author,
    has 2e-3 and 3 epochs on CIFAR-100, 3e-3 and 5 epochs on ImageNet-R; we take the rate of the former and the epochs
    of the latter for all. A task has at least 50 steps, in whole epochs: 60 new pictures make 2 steps an epoch, and 10
    steps are too few beside many old classes (docs/beyond.md has the held-out accuracies)."""
    batch_of: Literal["new", "all"] = "new"
    """What the batch size of stage 2 counts. new: the new pictures, to which replayed features are added; all: both
    together, each class with the same share, which makes more and smaller steps. The paper says 32 but not which."""
    average_tower: bool = False
    """Whether the tower after task k is the average of the tower before it, with weight (k−1)/k, and the tower after
    stage 1, with weight 1/k. Not in the paper; it removes most of the drift."""
    prompt_length: PositiveInt = 10
    """M, the paper's value for all datasets."""
    prompt_std: NonNegativeFloat = 0.02
    """Standard deviation of the initial prompt vectors. The paper does not say; CoOp's value."""
    suffix: str = ""
    """What follows the class name in a soft prompt. The paper writes [V1]..[VM][CLS], so nothing; CoOp has a period."""
    train_old_prompts: bool = True
    """Whether prompts of old classes continue to train. The paper does not say; replay can correct old classes only if
    their prompts are trainable."""
    max_replay: PositiveInt = 512
    """Maximum number of replayed features per step. Old and new classes have equal weight for any value. The paper does
    not say."""
    softmax_classes: NonNegativeInt = 4096
    """Above this many classes the softmax of a step is over the new classes, the replayed ones and the nearest old
    classes of each, instead of over all; 0: always all. For streams of thousands of classes; not in the paper."""
    max_spaces: PositiveInt = 64
    """Maximum number of maps that the memory keeps; the classes of older spaces are moved into the current one
    (`GaussianMemory.fold`). One map belongs to each task after which the tower changed."""
    calibration: CalibrationName = "none"
    """How stored Gaussians follow the tower. task: one optimal-transport map from the task's averaged statistics,
    Eq. (4); class: a map for each class, averaged (the paper's alternative). Not in the paper: pairs, least squares on
    the features before and after (LDC); sdc, each mean moves as the new pictures near it moved (SDC)."""
    task_prompt: bool = False
    """Whether a prompt shared by the task is added, Eq. (5)."""
    beta: NonNegativeFloat = 0.1
    """Weight of the task prompt; the paper: 0.1 ImageNet-R and UCF-101, 0.05 CIFAR-100, 1.5 CUB-200."""
    ortho: NonNegativeFloat = 0.1
    """λ of the orthogonality loss, Eq. (7); the paper: 0.5 CUB-200, else 0.1."""
    normalise_parts: bool = False
    """Whether f_t(P) is normalised before the sum of Eq. (5). The paper's formula normalises the sum alone."""
    simultaneous: bool = False
    """Ablation: tower and prompts trained together in one stage, by the loss and for the epochs of stage 2, the tower
    at the learning rate and with the augmentation of stage 1; average_tower is ignored. The paper gives neither loss
    nor epochs."""

    def __post_init__(self) -> None:
        fill(self.template, "")  # refuses a template without a place for the class name


@options
class DMCOTConfig(DMCConfig):
    calibration: CalibrationName = "task"
    task_prompt: bool = True


@register
class DMC(Method):
    name = "dmc"
    title = "DMC"
    Config = DMCConfig
    keeps = "class Gaussians"
    tunes_tower = True
    config: DMCConfig
    classifier: Tensor  # (C, dim): w of Eq. (5) for every class seen, unit length
    task_texts: Tensor  # (K, dim): f_t of every task prompt, unit length

    def build(self) -> None:
        self.tower = self.clip.vision
        self.memory = GaussianMemory()
        self.class_prompts = nn.ParameterList()  # a task each: (C_k, M, width)
        self.task_prompts = nn.ParameterList()  # a task each: (1, M, width)
        self.class_texts = nn.ModuleList()
        self.growing_buffer("classifier", self.dim)
        self.register_buffer("task_texts", torch.zeros(0, self.dim, device=self.device))
        self.task_text = PromptTexts(self.clip, [""], self.config.prompt_length)

    def check_names(self, names: Sequence[str]) -> None:
        check_sentences(self.clip, names, [self.config.template])
        tokenize_names(self.clip, names, self.config.prompt_length, self.config.suffix)

    def allocate(self, names: Sequence[str]) -> None:
        length, width = self.config.prompt_length, self.clip.config.text.width
        self.class_texts.append(PromptTexts(self.clip, names, length, self.config.suffix))
        for prompts, count in ((self.class_prompts, len(names)), (self.task_prompts, int(self.config.task_prompt))):
            vectors = torch.randn(count, length, width, device=self.device) * self.config.prompt_std
            prompts.append(nn.Parameter(vectors, requires_grad=False))
        if self.config.task_prompt:
            self.task_texts = torch.cat([self.task_texts, self.task_texts.new_zeros(1, self.task_texts.shape[1])])

    def learn_task(self, task: Task) -> None:
        """Algorithm 1."""
        pictures, phase = task.pictures, self.session.monitor.phase
        calibrate = self.config.calibration != "none" and len(self.memory) > 0
        with phase("statistics before"):
            before = self.class_features(pictures) if calibrate else []
        if self.config.simultaneous:
            self.train_together(pictures)
        else:
            self.adapt_tower(task)
        with phase("statistics after"):
            after = self.class_features(pictures)
        if calibrate:
            with phase("calibration"):
                CALIBRATIONS[self.config.calibration](self.memory, before, after)
                self.memory.fold(self.config.max_spaces)
        if not self.config.simultaneous:
            self.train_prompts(pictures)
        self.memory.add(after)
        with torch.no_grad():  # frozen prompts keep their stored text features
            self.classifier, self.task_texts = self.text_classifier(all_classes=self.config.train_old_prompts)

    def learn_again(self, task: Task) -> None:
        """More pictures of known classes: their Gaussians become those of the union, and the prompts are trained
        further. These classes are replayed too, so that one new picture does not outweigh the many earlier ones. The
        tower stays frozen, so nothing drifts. The paper has no such case."""
        features, labels = normalize(task.pictures.features, dim=-1), task.pictures.labels
        for label in torch.unique(labels).tolist():
            self.memory.merge(label, features[labels == label].double())
        parameters = self.prompt_parameters(every=True)
        self.fit_prompts(task.pictures.labels, len(features), lambda rows: features[rows], parameters, again=True)
        with torch.no_grad():
            self.classifier, self.task_texts = self.text_classifier(all_classes=True)

    @torch.no_grad()
    def forget(self, index: int) -> None:
        task, place = self.drop_class(index)
        self.memory.remove(index)
        prompts = self.class_prompts[task]
        left = torch.cat([prompts[:place], prompts[place + 1 :]])
        if len(left):
            first = sum(self.sizes[:task])
            names = self.names[first : first + self.sizes[task]]
            self.class_prompts[task] = nn.Parameter(left, requires_grad=False)
            self.class_texts[task] = PromptTexts(self.clip, names, self.config.prompt_length, self.config.suffix)
            return
        keep = [other for other in range(len(self.class_prompts)) if other != task]
        self.class_prompts = nn.ParameterList(self.class_prompts[other] for other in keep)
        self.task_prompts = nn.ParameterList(self.task_prompts[other] for other in keep)
        self.class_texts = nn.ModuleList(self.class_texts[other] for other in keep)
        if self.config.task_prompt:
            self.task_texts = self.task_texts[keep]

    def logits(self, batch: Batch) -> Tensor:
        return self.clip.scale * normalize(batch.features, dim=-1) @ self.classifier.T

    def class_features(self, pictures: Pictures) -> list[Tensor]:
        """Unit features of each new class by the current tower, (n_c, dim) float64. §3.1 normalises z_v."""
        features, labels = normalize(pictures.features, dim=-1).double(), pictures.labels
        return [features[labels == label] for label in self.new_labels]

    def adapt_tower(self, task: Task) -> None:
        """Stage 1: Eq. (1), pictures against the frozen texts of the task's classes."""
        texts = encode_classes(self.clip, task.names, [self.config.template])
        scale, labels = self.clip.scale, task.pictures.labels - self.old

        def loss(rows: Tensor, batch: Pictures) -> Tensor:
            return clip_loss(scale * self.encode(batch, self.config.stage1.augment) @ texts.T, labels[rows])

        past = {name: value.detach().clone() for name, value in self.tower.named_parameters()}
        what = (self.config.tuned, self.config.tuned_blocks, self.config.lora_rank)
        given: list[Tensor | str] = [repr(what), repr(self.clip.config), task.pictures.key, labels, texts, scale]
        given += past.values()
        with own_random("stage1", task.index), tuned(self.clip, *what) as parameters:
            self.session.fit("stage1", parameters, task.pictures, loss, self.config.stage1, depends_on=given)
        if self.config.average_tower:
            learnt = int(self.memory.tasks) + 1  # k; `sizes` has no entry for a task whose classes are all forgotten
            with torch.no_grad():
                for name, value in self.tower.named_parameters():
                    value.copy_(torch.lerp(past[name], value, 1 / learnt))

    def encode(self, batch: Pictures, augment: Augment = "none") -> Tensor:
        """Unit features (B, dim) of the tower as it is now, with gradients."""
        if augment != "none":
            pixels = augmented(batch.pixels, augment)  # the whole batch, so that every process draws the same
            return normalize(spread(lambda part: self.tower(part, class_only=True).features, pixels), dim=-1)
        return normalize(spread(lambda part: self.tower(part.pixels, class_only=True).features, batch), dim=-1)

    def train_prompts(self, pictures: Pictures) -> None:
        """Stage 2: Eq. (7) on the task's features and on features drawn from the Gaussians of all old classes."""
        features = normalize(pictures.features, dim=-1)
        self.fit_prompts(pictures.labels, len(features), lambda rows: features[rows], self.prompt_parameters())

    def train_together(self, pictures: Pictures) -> None:
        """Ablation: the loss of stage 2 with the tower free to move."""
        with tuned(self.clip, self.config.tuned, self.config.tuned_blocks, self.config.lora_rank) as tower:
            groups = [
                {"params": self.prompt_parameters(), "lr": self.config.stage2.lr},
                {"params": tower, "lr": self.config.stage1.lr},
            ]
            augment = self.config.stage1.augment
            self.fit_prompts(pictures.labels, pictures, lambda rows, batch: self.encode(batch, augment), groups)

    def prompt_parameters(self, every: bool = False) -> list[nn.Parameter]:
        """The prompts that train: of all tasks, or of the newest alone where the old ones are frozen."""
        every = every or self.config.train_old_prompts
        lists = [self.class_prompts, self.task_prompts] if self.config.task_prompt else [self.class_prompts]
        return [prompts for group in lists for prompts in (group if every else group[-1:])]

    def fit_prompts(
        self,
        labels: Tensor,
        data: int | Pictures,
        features: Callable[..., Tensor],
        parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
        again: bool = False,
    ) -> None:
        """Eq. (7) on `features` of the rows of a step, and on replayed old classes. `again`: replay these classes too.

        `features` is called with the rows of `data`, as the loss of `Session.fit` is; `labels` (N,) are theirs.
        """
        every = again or self.config.train_old_prompts
        new, old = len(self.new_labels), self.old
        if again:
            new, old = len(torch.unique(labels)), self.seen
        # The new classes together weigh as much as the same number of old ones, however few features are replayed.
        share = new / (new + old)
        how, replayed = self.budget(share)
        steps = -(-len(labels) // how.batch_size)
        sampled = not again and bool(old) and 0 < self.config.softmax_classes < self.seen
        near = nearest_classes(self.classifier[:old], NEAREST) if sampled else None
        # For each step of an epoch: features (R, dim), their targets (R,), and the classes of the softmax (None: all).
        drawn: list[tuple[Tensor, Tensor, Tensor | None]] = []

        def draw() -> None:
            """Draw the replayed features of one epoch: R = `replayed` for each step, each old class equally often."""
            if not old:
                return
            turns = -(-steps * replayed // old)
            classes = torch.cat([torch.randperm(old) for _ in range(turns)])[: steps * replayed]
            samples = normalize(self.memory.sample(classes), dim=-1)
            drawn.clear()
            for own, part in zip(torch.split(samples, replayed), torch.split(classes, replayed), strict=True):
                targets, among = (part, None) if near is None else sampled_classes(part, near, self.seen)
                drawn.append((own, targets.to(self.device), None if among is None else among.to(self.device)))

        def loss(rows: Tensor, *batch: Pictures) -> Tensor:
            texts, tasks = self.text_classifier(every)
            samples, sample_targets, among = drawn.pop() if old else (None, None, None)
            weights = self.clip.scale * (texts if among is None else texts[among]).T
            targets = labels[rows] if among is None else labels[rows] - (self.seen - len(among))  # new classes are last
            value = share * cross_entropy(features(rows, *batch) @ weights, targets)
            if samples is not None and sample_targets is not None:
                value = value + (1 - share) * cross_entropy(samples @ weights, sample_targets)
            if self.config.task_prompt:
                value = value + self.config.ortho * orthogonality(tasks)
            return value

        self.session.fit("stage2", parameters, data, loss, how, each_epoch=draw)

    def budget(self, share: float) -> tuple[Training, int]:
        """How stage 2 trains where the new classes are a `share` of all, and how many features it replays in a step."""
        how, replayed = self.config.stage2, 0
        if self.config.batch_of == "all":
            own = max(1, round(how.batch_size * share))
            replayed = max(1, how.batch_size - own) if share < 1 else 0
            how = replace(how, batch_size=own)
        elif share < 1:
            replayed = math.ceil(how.batch_size * (1 - share) / share - 1e-9)
        return how, min(self.config.max_replay, replayed)

    def text_classifier(self, all_classes: bool) -> tuple[Tensor, Tensor]:
        """Eq. (5): the unit vectors w (C, dim), and the unit task texts (K, dim).

        Without `all_classes` only the newest task is encoded; the others are taken as they were stored.
        """
        first = 0 if all_classes else len(self.sizes) - 1
        prompts = [self.class_texts[i](self.class_prompts[i]) for i in range(first, len(self.sizes))]
        if self.config.task_prompt:
            prompts += [self.task_text(vectors) for vectors in self.task_prompts[first:]]
        encoded = encode_prompts(self.clip, prompts)
        if self.config.normalise_parts:
            encoded = normalize(encoded, dim=-1)
        count = sum(self.sizes[first:])
        classes, tasks = encoded[:count], encoded[count:]
        if self.config.task_prompt:
            # Views and one copy: an index made from the list of sizes would have to cross to the device at every step.
            of_class = torch.cat([task.expand(size, -1) for task, size in zip(tasks[:, None], self.sizes[first:])])
            classes = classes + self.config.beta * of_class
        texts, tasks = normalize(classes, dim=-1), normalize(tasks, dim=-1)
        if first:
            texts = torch.cat([self.classifier[:-count], texts])
            tasks = torch.cat([self.task_texts[:-1], tasks])
        return texts, tasks


@register
class DMCOT(DMC):
    name = "dmc-ot"
    title = "DMC-OT"
    Config = DMCOTConfig


def nearest_classes(texts: Tensor, count: int) -> Tensor:
    """Indices (C, min(count, C)) of the classes whose unit texts (C, dim) are nearest to each class and of itself."""
    parts = [part @ texts.T for part in torch.split(texts, 1024)]
    return torch.cat([part.topk(min(count, len(texts)), dim=1).indices for part in parts]).cpu()


def sampled_classes(classes: Tensor, near: Tensor, seen: int) -> tuple[Tensor, Tensor]:
    """The classes that a step's softmax is over, and where the replayed ones stand among them.

    Args:
        classes: (R,) old classes replayed in the step.
        near: (C_old, k) from `nearest_classes`.
        seen: Number of classes seen; those from C_old on are new, and all of them are included, last.

    Returns:
        Targets (R,) and the classes of the softmax (S,), ascending: `classes == among[targets]`.
    """
    among = torch.cat([torch.unique(near[classes]), torch.arange(len(near), seen)])
    return torch.searchsorted(among, classes), among


def orthogonality(tasks: Tensor) -> Tensor:
    """Eq. (6): 1/(K(K−1)) Σ_{i≠j} (f_t(P_i)ᵀ f_t(P_j))² of the task texts (K, dim).

    The paper does not say whether f_t is normalised here; with CLIP's unnormalised texts the term would dwarf the
    cross-entropy, so unit texts are used. Zero for one task.
    """
    count = len(tasks)
    if count < 2:
        return tasks.new_zeros(())
    gram = tasks @ tasks.T
    return (gram.square().sum() - gram.diagonal().square().sum()) / (count * (count - 1))

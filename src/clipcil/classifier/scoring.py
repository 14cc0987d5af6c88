"""Scoring: evaluation on labelled pictures, temperature scaling, and the threshold for "none of these".

Temperature and threshold are fitted to held-out pictures of known classes; no picture of an unknown class is needed.
The threshold applies to the method's own novelty score, such as the distance to the nearest class; for a method without
one, to the highest probability.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from clipcil.intervals import wilson_interval
from clipcil.settings import Share

FALSE_ALARMS = 0.05
"""Share of pictures of known classes that may be called unknown."""
ENOUGH = 20
"""Held-out pictures needed to fit a temperature and a threshold; a 5 % threshold needs at least 19."""


@dataclass(frozen=True)
class Calibration:
    """How scores become probabilities and decisions. With too few held-out pictures no picture is called unknown."""

    temperature: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Logits are multiplied by it before the softmax."""
    threshold: Share | None = None
    """A picture whose highest probability lies below it is none of the classes; None: nothing is."""
    pictures: int = 0
    """Number of held-out pictures for fitting the two."""
    novelty: float | None = None
    """A picture whose novelty score lies above it is none of the classes; None: the method has no such score, and the
    threshold of the probability decides."""
    false_alarms: float | None = None
    """Expected share of new pictures of known classes that are called unknown; None where there is no threshold."""

    @property
    def when_unknown(self) -> str:
        """When a picture is called "none of these", and how often that is a false alarm."""
        if self.threshold is None:
            few = "too few pictures are kept for evaluation" if self.pictures < ENOUGH else "the model knows one class"
            return f"nothing is called 'none of these': {few}"
        below = f"the likeliest class is below {self.threshold:.1%}"
        where = below if self.novelty is None else "it is unlike every class"
        share = f"{self.false_alarms or 0:.1%} of new pictures of known classes"
        return f"a picture is called 'none of these' where {where}; expect this for {share}"

    def is_unknown(self, probability: float, novelty: float | None) -> bool:
        """Whether a picture with this highest probability and novelty score is none of the classes."""
        if self.novelty is not None and novelty is not None:
            return novelty > self.novelty
        return self.threshold is not None and probability < self.threshold


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(temperature · logits), (B, C) → (B, C), float64."""
    return torch.softmax(logits.double() * temperature, dim=-1)


def calibrate(logits: Tensor, labels: Tensor, plain: float, novelty: Tensor | None = None) -> Calibration:
    """Fit temperature and threshold to the logits (N, C), classes (N,) and novelty (N,) of held-out pictures.

    With fewer than `ENOUGH` pictures, or with one class, whose probability is always 1, the temperature is `plain` and
    no picture is called unknown: a threshold from a handful of pictures would be arbitrary.
    """
    if len(labels) < ENOUGH or logits.shape[1] < 2:
        return Calibration(plain, None, len(labels))
    temperature = fit_temperature(logits, labels)
    scores = probabilities(logits, temperature).max(dim=1).values
    threshold, expected = threshold_for(scores)
    limit = None if novelty is None else -threshold_for(-novelty)[0]
    return Calibration(temperature, threshold, len(scores), limit, expected)


def threshold_for(scores: Tensor) -> tuple[float, float]:
    """The highest threshold below which at most `FALSE_ALARMS` of new scores like these (N,) are expected, and that
    share.

    Of N exchangeable scores and a new one, the new one is below the k-th smallest of the N with probability at most
    k/(N+1) (split conformal prediction), so k = ⌊`FALSE_ALARMS` · (N+1)⌋.
    """
    place = int(FALSE_ALARMS * (len(scores) + 1) + 1e-9)
    return float(scores.double().sort().values[place - 1]), place / (len(scores) + 1)


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The factor from 1/100 to 100 that makes the classes of held-out pictures most likely, by golden-section search.

    The likelihood of a softmax is concave in this factor, so the search finds the one maximum.
    """
    logits, low, high = logits.double(), torch.tensor(0.01).log().item(), torch.tensor(100.0).log().item()

    def cost(log_factor: float) -> float:
        return float(cross_entropy(logits * torch.tensor(log_factor).exp(), labels))

    golden = (5**0.5 - 1) / 2
    for _ in range(40):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if cost(left) <= cost(right):
            high = right
        else:
            low = left
    return float(torch.tensor((low + high) / 2).exp())


@dataclass(frozen=True)
class Answer:
    """A labelled picture and the answer of the model."""

    true: str
    guess: str
    """The likeliest class, whether or not the picture was called unknown."""
    probability: float
    unknown: bool = False
    """Whether the model said "none of these"."""
    picture: Any = None


@dataclass(frozen=True)
class ClassResult:
    """Accuracy on the pictures of one class."""

    name: str
    pictures: int
    right: int

    @property
    def accuracy(self) -> float | None:
        return self.right / self.pictures if self.pictures else None


@dataclass(frozen=True)
class Confusion:
    """Number of pictures of class `true` that were classified as `guess`."""

    true: str
    guess: str
    pictures: int


@dataclass(frozen=True)
class Evaluation:
    """The result of testing a model on labelled pictures.

    Answers count as they were given: a picture of a class that the model knows is right if it was given its true class,
    and wrong if it was given another or called "none of these". Pictures of other classes count only in
    `unknown_pictures` and `missed`.
    """

    pictures: int = 0
    """Pictures of classes that the model knows."""
    right: int = 0
    """Number of these that were given their true class."""
    right_if_forced: int = 0
    """Number of these whose likeliest class is the true one: right if the model had to answer with a class."""
    classes: list[ClassResult] = field(default_factory=list)
    """Every class of the model that had pictures, in the model's order."""
    confused: list[Confusion] = field(default_factory=list)
    """Pairs of classes by how often one was mistaken for the other, the most frequent first."""
    false_alarms: int = 0
    """Pictures of known classes that were called "none of these"."""
    unknown_pictures: int = 0
    """Pictures of classes that the model does not know."""
    unknown_classes: list[str] = field(default_factory=list)
    """Names of those classes, in the order in which they were found."""
    missed: int = 0
    """Pictures of unknown classes that were given a class instead of "none of these"."""
    mistakes: list[Answer] = field(default_factory=list)
    """Wrong answers: a wrong class, or a class for an unknown picture, the most confident first; then pictures of known
    classes that were called "none of these"."""
    unreadable: list[str] = field(default_factory=list)
    """A line for each picture that could not be read; these count nowhere else."""

    @property
    def accuracy(self) -> float | None:
        """Share of the pictures of known classes that were given their true class; None without any."""
        return self.right / self.pictures if self.pictures else None

    @property
    def accuracy_if_forced(self) -> float | None:
        """The accuracy if the model had to answer with a class; None without any picture of a known class."""
        return self.right_if_forced / self.pictures if self.pictures else None

    @property
    def recognised(self) -> float | None:
        """Share of the pictures of unknown classes that were called "none of these"; None without any."""
        return 1 - self.missed / self.unknown_pictures if self.unknown_pictures else None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the accuracy for pictures like these."""
        return wilson_interval(self.right, self.pictures)


def evaluate_answers(answers: Iterable[Answer], names: Sequence[str]) -> Evaluation:
    """Count answers.

    Args:
        answers: One for each picture; `true` is a class of `names`, or another name for a class the model never saw.
        names: Classes that the model knows, in its order.

    Examples:
        >>> found = evaluate_answers([Answer("cat", "cat", 0.9), Answer("cat", "dog", 0.6)], ["cat", "dog"])
        >>> found.accuracy, found.confused
        (0.5, [Confusion(true='cat', guess='dog', pictures=1)])
    """
    known, inside, outside, mistakes = set(names), list[Answer](), list[Answer](), list[Answer]()
    for each in answers:
        is_known = each.true in known
        (inside if is_known else outside).append(each)
        if each.unknown or each.guess != each.true if is_known else not each.unknown:
            mistakes.append(each)
    wrong = [each for each in mistakes if each.true in known]
    asked, errors = Counter(each.true for each in inside), Counter(each.true for each in wrong)
    pairs = Counter((each.true, each.guess) for each in wrong if not each.unknown)
    return Evaluation(
        pictures=len(inside),
        right=len(inside) - len(wrong),
        right_if_forced=sum(each.guess == each.true for each in inside),
        classes=[ClassResult(name, asked[name], asked[name] - errors[name]) for name in names if asked[name]],
        confused=[Confusion(*pair, count) for pair, count in pairs.most_common()],
        false_alarms=sum(each.unknown for each in inside),
        unknown_pictures=len(outside),
        unknown_classes=list(dict.fromkeys(each.true for each in outside)),
        missed=len(mistakes) - len(wrong),
        mistakes=sorted(mistakes, key=lambda answer: (answer.unknown, -answer.probability)),
    )

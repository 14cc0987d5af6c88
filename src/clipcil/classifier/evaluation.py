"""Evaluation on labelled pictures: accuracy with its interval, each class, the most confused pairs, the mistakes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from clipcil.intervals import wilson_interval


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

    A picture of a class the model knows is right if its likeliest class is the true one, whether or not it was also
    called unknown; how often that happened is in `false_alarms`. Pictures of other classes count only in
    `unknown_pictures`.
    """

    pictures: int = 0
    """Pictures of classes that the model knows."""
    right: int = 0
    """Number of these whose likeliest class is the true one."""
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
    """Wrong answers (a wrong class, or a class for an unknown picture), the most confident first."""
    unreadable: list[str] = field(default_factory=list)
    """A line for each picture that could not be read; these count nowhere else."""

    @property
    def accuracy(self) -> float | None:
        """Share of the pictures of known classes that are classified correctly; None without any."""
        return self.right / self.pictures if self.pictures else None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the accuracy for pictures like these."""
        return wilson_interval(self.right, self.pictures)

    def of(self, name: str) -> ClassResult:
        """The result of one class."""
        return next((result for result in self.classes if result.name == name), ClassResult(name, 0, 0))


def evaluate_answers(answers: Iterable[Answer], names: Sequence[str]) -> Evaluation:
    """Count answers.

    Args:
        answers: One for each picture; `true` is a class of `names`, or another name for a class the model never saw.
        names: Classes that the model knows, in its order.

    Example:
        >>> found = evaluate_answers([Answer("cat", "cat", 0.9), Answer("cat", "dog", 0.6)], ["cat", "dog"])
        >>> found.accuracy, found.confused
        (0.5, [Confusion(true='cat', guess='dog', pictures=1)])
    """
    known = set(names)
    asked, right, pairs = Counter[str](), Counter[str](), Counter[tuple[str, str]]()
    alarms = missed = 0
    unknown, mistakes = Counter[str](), []
    for answer in answers:
        if answer.true not in known:
            unknown[answer.true] += 1
            missed += not answer.unknown
            if not answer.unknown:
                mistakes.append(answer)
            continue
        asked[answer.true] += 1
        alarms += answer.unknown
        if answer.guess == answer.true:
            right[answer.true] += 1
        else:
            pairs[answer.true, answer.guess] += 1
            mistakes.append(answer)
    return Evaluation(
        pictures=asked.total(),
        right=right.total(),
        classes=[ClassResult(name, asked[name], right[name]) for name in names if asked[name]],
        confused=[Confusion(*pair, count) for pair, count in pairs.most_common()],
        false_alarms=alarms,
        unknown_pictures=unknown.total(),
        unknown_classes=list(unknown),
        missed=missed,
        mistakes=sorted(mistakes, key=lambda answer: -answer.probability),
    )

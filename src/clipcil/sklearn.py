"""Methods as scikit-learn estimators, on arrays of features and on lists of pictures.

`fit` learns from nothing, `partial_fit` learns more: new classes, and more of known ones; nothing of earlier calls is
needed again. All of them work in a `Pipeline`, in `cross_val_score` and with `clone`. Needs the extra `sklearn`.

Examples:
    >>> from clipcil.sklearn import StrataClassifier
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> model = StrataClassifier(random_features=256)
    >>> for few in ((0, 1, 2, 3, 4), (5, 6, 7), (8, 9)):
    ...     rows = [row for row in range(1000) if y[row] in few]
    ...     model = model.partial_fit(X[rows], y[rows])
    >>> bool(model.score(X[1000:], y[1000:]) > 0.9)
    True
"""

# ruff: noqa: N803  # X is what scikit-learn calls it

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from clipcil.classifier.classifier import DEFAULT_METHOD, Classifier
from clipcil.data.tasks import Task
from clipcil.errors import UserError
from clipcil.methods.base import Method, build_method
from clipcil.methods.discriminant import Discriminant
from clipcil.methods.ranpac import RanPAC
from clipcil.methods.simplecil import SimpleCIL
from clipcil.methods.strata import Strata
from clipcil.settings import override
from clipcil.training.trainer import Trainer

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ImportError("clipcil.sklearn needs an extra: pip install 'clipcil[sklearn]'") from error

SEED_STEP = 1_000_003
"""Call k of `partial_fit` draws from random_state + k · SEED_STEP."""


class IncrementalClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What the estimators share: labels of any kind, and scores in the order of `classes_`."""

    classes_: np.ndarray
    """All labels, sorted."""

    def fit(self, X: Any, y: Any) -> Self:
        """Learn from nothing: X (N, …) and labels y (N,)."""
        return self._learn(X, y, None, first=True)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:
        """Learn new classes and more of known ones.

        Args:
            X: As for `fit`.
            y: As for `fit`.
            classes: Labels that will come, which other estimators need to know. Here they only take their place in
                `classes_` earlier; their probability is 0 until they are learnt.
        """
        return self._learn(X, y, classes, first=not hasattr(self, "classes_"))

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest label of each of X: (N,)."""
        best = self._scores(X).argmax(1)
        return self.classes_[best]  # type: ignore[no-any-return]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities (N, C) in the order of `classes_`."""
        return torch.softmax(torch.from_numpy(self._scores(X)), dim=1).numpy()

    def decision_function(self, X: Any) -> np.ndarray:
        """Scores (N, C) in the order of `classes_`, whose softmax are the probabilities; of two classes the second
        minus the first, (N,)."""
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def _learn(self, X: Any, y: Any, classes: Any, first: bool) -> Self:
        """Give every label its number, in the order in which labels are learnt, and learn the rows."""
        X, y = self._checked(X, y, first)
        found = np.unique(y)
        if first:
            self._labels, self._calls = found[:0], 0
            self._start(X)
        new = found[~np.isin(found, self._labels)]
        labels = np.concatenate([self._labels, new])
        numbers = np.argsort(labels)[np.searchsorted(np.sort(labels), y)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.random_state + SEED_STEP * self._calls)
            self._teach(X, numbers, [str(label) for label in new])
        self._labels, self._calls = labels, self._calls + 1
        self.classes_ = np.unique(np.concatenate([labels, found[:0] if classes is None else np.asarray(classes)]))
        return self

    def _scores(self, X: Any) -> np.ndarray:
        """(N, C) float64 in the order of `classes_`; −∞ for a class that is not learnt yet."""
        check_is_fitted(self, "classes_")
        X = self._checked(X, None, False)
        scores = np.full((len(X), len(self.classes_)), -np.inf)
        if len(X):
            scores[:, np.searchsorted(self.classes_, self._labels)] = self._logits(X)
        return scores


class FeatureClassifier(IncrementalClassifier):
    """A method on an array of features (N, D), which takes the place of a backbone. Subclasses name the method."""

    kind: ClassVar[type[Method]]

    def _checked(self, X: Any, y: Any, first: bool) -> Any:
        if y is None and not first:
            return validate_data(self, X, reset=False)
        X, y = validate_data(self, X, y, reset=first)
        check_classification_targets(y)
        return X, y

    def _start(self, X: np.ndarray) -> None:
        config = {key: value for key, value in self.get_params(deep=False).items() if key != "random_state"}
        space: Any = FeatureSpace(X.shape[1])
        self._method = build_method(
            self.kind, override(self.kind.Config(), config), space, Trainer(), self.random_state
        )

    def _teach(self, X: np.ndarray, numbers: np.ndarray, names: list[str]) -> None:
        method, known = self._method, numbers < self._method.seen
        for rows, new in ((~known, names), (known, [])):
            if rows.any():
                order = np.flatnonzero(rows)[np.argsort(numbers[rows], kind="stable")]
                given: Any = Features(torch.tensor(X[order], dtype=torch.float32), torch.tensor(numbers[order]))
                method.learn(Task(len(method.sizes), new, given))
        self._exact = copy.deepcopy(method).double()  # a row's scores do not depend on the rows beside it

    @torch.no_grad()
    def _logits(self, X: np.ndarray) -> np.ndarray:
        given: Any = Features(torch.tensor(X, dtype=torch.float64), torch.zeros(0))
        return (self._exact.logits(given) * self._exact.score_scale).numpy()


class StrataClassifier(FeatureClassifier):
    """Strata on features of one level and without texts: a linear discriminant and a ridge regression on random ReLU
    features, mixed by leave-one-out. The options are those of the method `strata`."""

    kind = Strata

    def __init__(
        self,
        random_features: int = 2048,
        rows_per_dim: int = 2,
        leave_one_out_rows: int = 1500,
        random_state: int = 0,
    ) -> None:
        self.random_features = random_features
        self.rows_per_dim = rows_per_dim
        self.leave_one_out_rows = leave_one_out_rows
        self.random_state = random_state


class SimpleCILClassifier(FeatureClassifier):
    """SimpleCIL on features: the class mean with the highest cosine."""

    kind = SimpleCIL

    def __init__(self, random_state: int = 0) -> None:
        self.random_state = random_state


class RanPACClassifier(FeatureClassifier):
    """RanPAC on features: ridge regression on random ReLU features. The options are those of the method `ranpac`."""

    kind = RanPAC

    def __init__(self, projections: int = 0, held_out: float = 0.2, random_state: int = 0) -> None:
        self.projections = projections
        self.held_out = held_out
        self.random_state = random_state


class DiscriminantClassifier(FeatureClassifier):
    """Discriminant on features: a mean for each class and one covariance for all."""

    kind = Discriminant

    def __init__(self, random_state: int = 0) -> None:
        self.random_state = random_state


class PictureClassifier(IncrementalClassifier):
    """A `clipcil.Classifier` on lists of pictures: paths, PIL images, the bytes of files or arrays.

    Args:
        method: One of `clipcil methods`.
        backbone: "mini", a Hugging Face id, a folder or a file.
        settings: Settings of the method.
        hold_out: As for `Classifier.learn`.
        random_state: The seed.
    """

    def __init__(
        self,
        method: str = DEFAULT_METHOD,
        backbone: str = "mini",
        settings: dict[str, Any] | None = None,
        hold_out: bool = True,
        random_state: int = 0,
    ) -> None:
        self.method = method
        self.backbone = backbone
        self.settings = settings
        self.hold_out = hold_out
        self.random_state = random_state

    def _checked(self, X: Any, y: Any, first: bool) -> Any:
        X = [X[row] for row in range(len(X))]
        if y is None:
            return X
        check_consistent_length(X, y)
        check_classification_targets(y)
        return X, column_or_1d(y)

    def _start(self, X: Sequence[Any]) -> None:
        self.model_ = Classifier(self.method, self.backbone, self.random_state, **(self.settings or {}))

    def _teach(self, X: Sequence[Any], numbers: np.ndarray, names: list[str]) -> None:
        if known := [name for name, place in zip(names, self.model_.learner.facts.find(names)) if place is not None]:
            raise UserError(f"label '{known[0]}' is a class already: names that differ in case only are one class")
        names = [*self.model_.classes, *names]
        pictures: dict[str, list[Any]] = {names[number]: [] for number in np.unique(numbers)}
        for picture, number in zip(X, numbers, strict=True):
            pictures[names[number]].append(picture)
        self.model_.learn(pictures, hold_out=self.hold_out)

    def _logits(self, X: Sequence[Any]) -> np.ndarray:
        logs: np.ndarray = np.log(self.model_.predict_proba(X).clip(1e-300))
        return logs


class FeatureSpace:
    """Stands for a backbone where features are given: one level, no tower, and texts that say nothing."""

    def __init__(self, width: int) -> None:
        self.config = SimpleNamespace(dim=width, vision=SimpleNamespace(width=width))
        self.vision = SimpleNamespace(level_sizes=(width,), visual_projection=torch.nn.Identity())
        self.scale = torch.tensor(100.0)
        """CLIP's own, for methods that give cosines."""

    def to(self, device: torch.device) -> Self:
        """Estimators compute on the CPU."""
        return self

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """(N, width): zeros."""
        return torch.zeros(len(texts), self.config.dim)


class Features:
    """A batch of given features (B, D) with their labels (B,)."""

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.features = self.pooled = self.levels = features
        self.labels = labels

    def __len__(self) -> int:
        return len(self.features)

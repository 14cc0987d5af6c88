"""The results of an experiment: the metrics of class-incremental learning, as numbers, tables and files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clipcil.data.tasks import TaskStream
from clipcil.experiment.evaluate import Record
from clipcil.plugins import need_extra
from clipcil.report.html import render
from clipcil.report.runs import NUMBERS, RunRecord

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Results:
    """The accuracies of an experiment after the tasks measured so far, in percent.

    In a notebook it shows the accuracy matrix.

    Examples:
        >>> import clipcil
        >>> experiment = clipcil.Experiment("simplecil", data="emoji", tasks=10)
        >>> for task in experiment:
        ...     experiment.learn(task)
        ...     if task.index == 1:
        ...         break
        >>> results = experiment.evaluate()
        >>> results.matrix.shape
        (2, 2)
        >>> abs(results.last - float(results.matrix[1].mean())) < 1e-9
        True
    """

    config: dict[str, Any]
    """Every option and setting of the experiment."""
    names: list[str]
    """Names of all classes, in the order in which they are learnt."""
    sizes: list[int]
    """Number of classes of each task."""
    records: list[Record]
    """The counts after each task."""
    drift: list[dict[str, float] | None]
    """Distance of the stored class Gaussians from the features of old training pictures after each task, where a method
    has Gaussians."""
    notes: list[str]
    """Remarks for reports."""

    @cached_property
    def matrix(self) -> NDArray[np.float64]:
        """R[k, i]: accuracy on task i after learning task k; NaN where i > k."""
        bounds = np.cumsum([0, *self.sizes])
        matrix = np.full((len(self.records), len(self.records)), np.nan)
        for k, record in enumerate(self.records):
            for i in range(k + 1):
                own = slice(bounds[i], bounds[i + 1])
                matrix[k, i] = _percent(sum(record.correct[own]), sum(record.total[own]))
        return matrix

    @cached_property
    def after(self) -> list[float]:
        """A_k after each task k: the mean over the tasks seen of R[k, i]."""
        return [_mean(row[: k + 1]) for k, row in enumerate(self.matrix)]

    @cached_property
    def after_weighted(self) -> list[float]:
        """The same over pictures instead of tasks."""
        return [_percent(sum(record.correct), sum(record.total)) for record in self.records]

    @property
    def last(self) -> float:
        """A_B = 1/K Σ_i R[K, i]: the mean over the K tasks so far of the accuracy on each, after the newest task."""
        return self.after[-1]

    @property
    def average(self) -> float:
        """Ā: the mean of A_k over the tasks so far."""
        return _mean(self.after)

    @property
    def last_weighted(self) -> float:
        """A_B over pictures instead of tasks."""
        return self.after_weighted[-1]

    @property
    def average_weighted(self) -> float:
        """Ā over pictures instead of tasks."""
        return _mean(self.after_weighted)

    @property
    def forgetting(self) -> float:
        """Mean over the older tasks of the best accuracy so far minus the newest."""
        old, newest = self.matrix[:-1], self.matrix[-1]
        return _mean([float(np.nanmax(old[i:, i])) - newest[i] for i in range(len(old)) if not np.isnan(newest[i])])

    @property
    def backward_transfer(self) -> float:
        """Mean over the older tasks of the newest accuracy minus the first."""
        return _mean([self.matrix[-1, i] - self.matrix[i, i] for i in range(len(self.matrix) - 1)])

    @property
    def per_class(self) -> dict[str, float]:
        """Accuracy of each class seen; NaN for a class without test pictures."""
        newest = self.records[-1]
        return {
            name: 100 * right / total if total else math.nan
            for name, right, total in zip(self.names, newest.correct, newest.total, strict=False)
        }

    def to_pandas(self) -> pandas.DataFrame:
        """The accuracy matrix as a data frame with a row after each task and a column A_k; needs the extra `pandas`."""
        frame: pandas.DataFrame = need_extra("pandas").DataFrame(self.matrix, self._labels, self._labels)
        frame["A_k"] = self.after
        return frame

    def as_dict(self) -> dict[str, Any]:
        """The contents of `results.json`."""
        return RunRecord(
            **{key: round(getattr(self, key), 4) for key in NUMBERS},
            after=[round(value, 4) for value in self.after],
            after_weighted=_rounded(self.after_weighted),
            matrix=[_rounded(row) for row in self.matrix.tolist()],
            per_class=dict(zip(self.per_class, _rounded(self.per_class.values()), strict=True)),
            sizes=self.sizes,
            drift=self.drift,
            between_tasks=self.records[-1].between_tasks,
            notes=self.notes,
            config=self.config,
        ).values

    def matrix_csv(self) -> str:
        """The contents of `matrix.csv`."""
        body = [
            [name, *("" if math.isnan(value) else f"{value:.4f}" for value in row), f"{after:.4f}"]
            for name, row, after in zip(self._labels, self.matrix.tolist(), self.after, strict=True)
        ]
        return _csv([["after", *self._labels, "A_k"], *body])

    def predictions_csv(self, stream: TaskStream) -> str:
        """The contents of `predictions.csv`: the prediction for every test picture after the last task."""
        rows: list[list[Any]] = [["task", "row", "picture", "class", "predicted", "probability"]]
        last = self.records[-1]
        for task, answers in enumerate(zip(last.predictions, last.probabilities, strict=True)):
            pictures = stream.test_set(task)
            for index, (guess, probability) in enumerate(zip(*answers, strict=True)):
                names = (self.names[int(pictures.labels[index])], self.names[guess])
                where = (task + 1, int(pictures.rows[index]), pictures.describe(index))
                rows.append([*where, *names, f"{probability:.4f}"])
        return _csv(rows)

    @property
    def _labels(self) -> list[str]:
        return [f"task {number}" for number in range(1, len(self.records) + 1)]

    def __repr__(self) -> str:
        done = f"{len(self.records)} of {len(self.sizes)} tasks"
        return f"Results(after {done}: A_B {self.last:.2f} %, Ā {self.average:.2f} %)"

    def _repr_html_(self) -> str:
        return render("matrix.html", results=self, labels=self._labels)


def _percent(part: int, whole: int) -> float:
    return 100 * (part / whole) if whole else math.nan


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    known = [float(value) for value in values if not np.isnan(value)]
    return sum(known) / len(known) if known else 0.0


def _rounded(values: Any) -> list[float | None]:
    return [None if math.isnan(value) else round(value, 4) for value in values]


def _csv(rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()

"""The results of an experiment: accuracies after each task, as numbers, tables and files."""

from __future__ import annotations

import csv
import html
import io
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clipcil.experiment.evaluate import Record
from clipcil.report.metrics import Metrics, compute_metrics
from clipcil.report.runs import RunRecord

if TYPE_CHECKING:
    import pandas

    from clipcil.data.tasks import TaskStream

NUMBERS = ("last", "average", "last_weighted", "average_weighted", "forgetting", "backward_transfer")


@dataclass(frozen=True)
class Results:
    """The accuracies of an experiment after the tasks measured so far, in percent.

    In a notebook it shows the accuracy matrix.

    Example:
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
    """What was counted after each task."""
    drift: list[dict[str, float] | None]
    """Distance of the stored class Gaussians from the features of old training pictures after each task, where a method
    has Gaussians."""
    notes: list[str]
    """What a report should say beside the numbers."""

    @cached_property
    def metrics(self) -> Metrics:
        """All numbers together."""
        counts = ([getattr(record, name) for record in self.records] for name in ("correct", "total"))
        return compute_metrics(self.sizes, *counts)

    @property
    def last(self) -> float:
        """A_B: the mean over the tasks so far of the accuracy on each, after the newest task."""
        return self.metrics.last

    @property
    def average(self) -> float:
        """Ā: the mean of A_B over the tasks so far."""
        return self.metrics.average

    @property
    def after(self) -> list[float]:
        """A_k after each task k."""
        return self.metrics.after

    @property
    def matrix(self) -> NDArray[np.float64]:
        """R[k, i]: accuracy on task i after learning task k; NaN where i > k."""
        return self.metrics.matrix

    @property
    def forgetting(self) -> float:
        """Mean over the older tasks of the best accuracy so far minus the newest."""
        return self.metrics.forgetting

    @property
    def backward_transfer(self) -> float:
        """Mean over the older tasks of the newest accuracy minus the first."""
        return self.metrics.backward_transfer

    @property
    def per_class(self) -> dict[str, float]:
        """Accuracy of each class seen; NaN for a class without test pictures."""
        return dict(zip(self.names, self.metrics.per_class, strict=False))

    def to_pandas(self) -> pandas.DataFrame:
        """The accuracy matrix as a data frame with a row after each task and a column A_k. Needs pandas."""
        import pandas

        frame = pandas.DataFrame(self.matrix, *self._labels())
        frame["A_k"] = self.after
        return frame

    def as_dict(self) -> dict[str, Any]:
        """The contents of `results.json`."""
        metrics = self.metrics
        record = RunRecord(
            **{key: round(getattr(metrics, key), 4) for key in NUMBERS},
            after=[round(value, 4) for value in self.after],
            after_weighted=[_rounded(value) for value in metrics.after_weighted],
            matrix=[[_rounded(value) for value in row] for row in self.matrix.tolist()],
            per_class={name: _rounded(value) for name, value in self.per_class.items()},
            sizes=self.sizes,
            drift=self.drift,
            between_tasks=self.records[-1].between_tasks,
            notes=self.notes,
            config=self.config,
        )
        return record.values

    def matrix_csv(self) -> str:
        """The contents of `matrix.csv`."""
        rows, columns = self._labels()
        body = [
            [name, *("" if math.isnan(value) else f"{value:.4f}" for value in row), f"{after:.4f}"]
            for name, row, after in zip(rows, self.matrix.tolist(), self.after, strict=True)
        ]
        return _csv([["after", *columns, "A_k"], *body])

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

    def __repr__(self) -> str:
        done = f"{len(self.records)} of {len(self.sizes)} tasks"
        return f"Results(after {done}: A_B {self.last:.2f} %, Ā {self.average:.2f} %)"

    def _repr_html_(self) -> str:
        rows, columns = self._labels()
        lines = [f"<tr><th>after</th>{''.join(f'<th>{name}</th>' for name in (*columns, 'A_k'))}</tr>"]
        for name, row, after in zip(rows, self.matrix.tolist(), self.after, strict=True):
            cells = "".join(_cell(value) for value in row)
            lines.append(f"<tr><th>{name}</th>{cells}<td><b>{after:.1f}</b></td></tr>")
        return f"<table><caption>{html.escape(repr(self))}</caption>{''.join(lines)}</table>"

    def _labels(self) -> tuple[list[str], list[str]]:
        names = [f"task {number}" for number in range(1, len(self.records) + 1)]
        return names, list(names)


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def _cell(value: float) -> str:
    if math.isnan(value):
        return "<td></td>"
    return f'<td style="background: rgba(0, 114, 178, {value / 200:.3f})">{value:.1f}</td>'


def _csv(rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()

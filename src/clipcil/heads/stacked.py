"""Ridge regression with exact leave-one-out scores, and a mix of several heads that is chosen by such scores.

Leaving one picture out of a head that is fitted in closed form is a rank-one change, so the scores that a picture would
get from a head fitted without it need no second fit. Penalties, weights and temperatures can be chosen on these scores
of training pictures, and no picture has to be held out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Penalties of the regression to choose from, as shares of the average eigenvalue of the features' second moment."""


@dataclass(frozen=True)
class Head:
    """A linear classifier fitted to rows: scores = x · weight + bias for features x (B, D). All tensors are float64."""

    weight: Tensor  # (D, C)
    bias: Tensor  # (C,)
    left_out: Tensor  # (R, C): scores of the `left_out_rows`, each by the head fitted to all rows but that one
    penalty: float  # the one that was chosen


def fit_ridge(
    features: Tensor, labels: Tensor, classes: int, left_out_rows: Tensor, penalties: Sequence[float] = PENALTIES
) -> Head:
    """Ridge regression onto the classes' indicators, every class weighing the same, its penalty by leave-one-out.

        min Σ_i w_i ‖Wᵀφ_i + b − e_{y_i}‖² + r ‖W‖²,    w_i = n / (C n_{y_i})
        left out: (p_i − h_i e_{y_i}) / (1 − h_i),    h_i = w_i (‖φ_i − φ̄‖²_B + 1/Σw),  B = (Σ w (φ−φ̄)(φ−φ̄)ᵀ + r I)⁻¹

    with p_i the fitted scores: exact for penalty and weights held fixed. With fewer pictures than features the same
    solution comes from the smaller N×N matrix of inner products, K = Φ Φᵀ with rows √w (φ − φ̄):

        W = Φᵀ (K + r I)⁻¹ √w e_y,    w_i ‖φ_i − φ̄‖²_B = 1 − r [(K + r I)⁻¹]_ii

    Args:
        features: (N, F) φ; every class has at least one row.
        labels: (N,) int64.
        classes: C.
        left_out_rows: (R,) indices of the rows to compute leave-one-out scores of; their classes have two rows or more.
        penalties: Candidates of r, as shares of the average eigenvalue. The one with the likeliest left-out pictures is
            taken.

    Examples:
        >>> import torch
        >>> rows, labels = torch.tensor([[0.0], [1.0], [5.0], [6.0]]), torch.tensor([0, 0, 1, 1])
        >>> fit_ridge(rows, labels, 2, torch.arange(4)).weight.shape
        torch.Size([1, 2])
    """
    counts = torch.bincount(labels, minlength=classes).double()
    weights = len(labels) / (classes * counts)  # (C,): of each row of the class
    sums = class_sums(features, labels, classes) * weights[:, None]
    centre = sums.sum(0) / len(labels)  # Σ w = n
    scaled = (features - centre.to(features)) * weights.sqrt()[labels, None].to(features)
    level = (scaled.square().sum(dtype=torch.float64) / scaled.shape[1]).clamp(min=1e-30)
    own, few = labels[left_out_rows], len(scaled) < scaled.shape[1]
    seen, indicator = features[left_out_rows].double() - centre, one_hot(own, classes).double()
    products = (scaled @ scaled.T if few else scaled.T @ scaled).double()
    if few:
        targets = one_hot(labels, classes) * weights.sqrt()[labels, None]  # (N, C)
        columns = torch.eye(len(scaled)).to(products)[:, left_out_rows]
    else:
        targets = (sums - (counts * weights)[:, None] * centre).T  # (F, C)
        columns = seen.T

    def solve(penalty: float) -> tuple[Tensor, Tensor]:
        """The weight (F, C), and w ‖φ − φ̄‖²_B (R,) of the `left_out_rows`."""
        ridge = penalty * level
        factor = torch.linalg.cholesky(products + ridge * torch.eye(len(products)).to(products))
        solution = torch.cholesky_solve(targets, factor)
        squares = torch.linalg.solve_triangular(factor, columns, upper=False).square().sum(0)
        return (scaled.T.double() @ solution, 1 - ridge * squares) if few else (solution, weights[own] * squares)

    def left_out(penalty: float) -> Tensor:
        weight, leverage = solve(penalty)
        h = (leverage + weights[own] / len(labels))[:, None]
        return (seen @ weight + 1 / classes - h * indicator) / (1 - h).clamp(min=1e-9)

    penalty, scores = likeliest(left_out, penalties, own)
    weight, _ = solve(penalty)
    return Head(weight, 1 / classes - centre @ weight, scores, penalty)


def mix(scores: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Weights (G,) ≥ 0 of G tables of left-out scores (R, C) whose weighted sum makes the labels likeliest.

    Stacked generalisation (Wolpert 1992; Breiman 1996). The cross-entropy is convex in the weights; they are also the
    temperature, so the mixed logits can be read as probabilities. A head that does not help gets a weight near zero.

    Examples:
        >>> import torch
        >>> good, noise, labels = torch.eye(4), torch.zeros(4, 4), torch.tensor([0, 1, 2, 0])
        >>> mix([good, noise], labels)[0] > 0.1
        tensor(True)
    """
    # Each table is brought to a spread of one first, so that the search starts at a sensible place for all of them.
    units = spreads(scores)
    stacked = torch.stack([table / unit for table, unit in zip(scores, units, strict=True)]).double()
    logs = torch.zeros(len(scores), dtype=torch.float64, device=labels.device, requires_grad=True)
    search = torch.optim.LBFGS([logs], max_iter=100, line_search_fn="strong_wolfe")

    def weights() -> Tensor:  # bounded: a long step of the search would overflow, and every weight be NaN
        return logs.clamp(-30, 30).exp()

    def loss() -> Tensor:
        search.zero_grad()
        # The small pull keeps the weights finite where all left-out pictures are classified correctly.
        value = cross_entropy(torch.einsum("g,grc->rc", weights(), stacked), labels) + 1e-3 * weights().square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        search.step(loss)  # type: ignore[no-untyped-call]
    return weights().detach() / units


def spreads(scores: Sequence[Tensor]) -> Tensor:
    """(G,): the root mean square of each table of scores (R, C) around the means of its rows; more than 0."""
    apart = [table - table.mean(1, keepdim=True) for table in scores]
    return torch.stack([table.square().mean().sqrt() for table in apart]).clamp(min=1e-30)


def class_sums(rows: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(C, D) float64: the sum of the rows of each class."""
    return rows.new_zeros(classes, rows.shape[1], dtype=torch.float64).index_add_(0, labels, rows.double())


def likeliest(left_out: Callable[[float], Tensor], choices: Sequence[float], labels: Tensor) -> tuple[float, Tensor]:
    """The choice whose scores (R, C), at their best temperature, make the labels (R,) likeliest, and its scores.

    Without labels it is the middle choice.
    """
    if not len(labels):
        middle = choices[len(choices) // 2]
        return middle, left_out(middle)
    found = []
    for choice in choices:
        scores = left_out(choice)
        found.append((_cost(scores, labels), choice, scores))
    return min(found, key=lambda entry: entry[0])[1:]


def _cost(scores: Tensor, labels: Tensor) -> float:
    """Cross-entropy at the best temperature: convex in it, found by bisection of the derivative."""
    scores = scores - scores.mean(1, keepdim=True)
    own = scores.gather(1, labels[:, None]).mean()
    low, high = -20.0, 20.0
    unit = float(scores.square().mean().sqrt().clamp(min=1e-30))
    for _ in range(24):
        factor = 2.0 ** ((low + high) / 2) / unit
        slope = (torch.softmax(factor * scores, 1) * scores).sum(1).mean() - own
        low, high = (low, (low + high) / 2) if slope > 0 else ((low + high) / 2, high)
    return float(cross_entropy(2.0 ** ((low + high) / 2) / unit * scores, labels))

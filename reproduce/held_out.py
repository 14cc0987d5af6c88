"""How the parts of Strata were chosen: heads and depths, measured on training pictures that they did not learn.

    python -m reproduce.held_out                                      # emoji
    python -m reproduce.held_out --data cifar100 --data-root DIR --hold-out 15 --shots 45
    python -m reproduce.held_out --data cub200 --data-root DIR --hold-out 6

Prints Markdown: accuracy over all classes of each head on each choice of depths, and, with 60 % of the classes known,
how well each score tells a picture of an unknown class from one of a known class (area under the ROC curve). Means over
folds; a fold is the seed that draws the held-out pictures. No test picture is read.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.clip import CLIP, load_clip
from clipcil.data.dataset import Dataset, open_dataset
from clipcil.data.pictures import PictureSet
from clipcil.data.reader import Reader
from clipcil.experiment.experiment import Experiment, LoadCache
from clipcil.heads.lda import LDA, fit_rows
from clipcil.heads.stacked import Head, fit_ridge, mix
from clipcil.methods.strata import Strata
from clipcil.storage import cache_folder, read_text, write_json
from reproduce.claims import markdown_table

RANDOM = (1024, 2048, 4096)
OWN_SHARES = (0.25, 0.5)
LOOKED_AT = 1500
KNOWN = 0.6
TITLES = {"heads": (("head", "features"), 1), "novelty": (("score",), 3)}
"""First columns of each table, and its digits."""


class Fold:
    """Features of the pictures to learn and of those held out, at every depth that Strata reads."""

    def __init__(self, clip: CLIP, data: Dataset) -> None:
        reader = Reader(clip, cache_folder())
        self.train, self.held = reader.open(data.train), reader.open(data.test)
        self.sizes, self.classes = clip.vision.level_sizes, len(data.classes)
        starts = [sum(self.sizes[:depth]) for depth in range(len(self.sizes) + 1)]
        self.columns = [slice(first, last) for first, last in pairwise(starts)]
        share = max(1, LOOKED_AT // self.classes)
        by_class = [torch.nonzero(self.train.labels == label).flatten() for label in range(self.classes)]
        chosen = [rows[:share] for rows in by_class if len(rows) > 1]  # the first of each class that has two or more
        self.left_out_rows = torch.cat(chosen).sort().values

    def rows(self, depths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Unit features of these depths side by side, of the pictures to learn and of those held out; centred."""
        parts = [
            torch.cat([normalize(pictures.levels[:, self.columns[depth]], dim=1) for depth in depths], dim=1)
            for pictures in (self.train, self.held)
        ]
        return parts[0] - parts[0].mean(0), parts[1] - parts[0].mean(0)

    def accuracy(self, scores: Tensor) -> float:
        return 100 * float((scores.argmax(1) == self.held.labels).double().mean())


def heads(fold: Fold) -> Iterator[tuple[str, float]]:
    """Each head on each choice of depths, and its accuracy."""
    labels, last = fold.train.labels, len(fold.sizes) - 1
    joint, held = (normalize(pictures.features, dim=1) for pictures in (fold.train, fold.held))
    means = torch.stack([joint[labels == label].mean(0) for label in range(fold.classes)])
    yield "nearest mean | joint space (SimpleCIL)", fold.accuracy(held @ normalize(means, dim=1).T)
    names = {(depth,): f"depth {depth + 1} of {last + 1}" for depth in range(last)}
    names |= {(last,): "before the projection", tuple(range(last + 1)): "all depths"}
    for depths, name in names.items():
        train, held = fold.rows(depths)
        discriminant = fit_rows(train, labels, fold.classes, fold.left_out_rows)
        first = scores_of(discriminant, held)
        yield f"linear discriminant | {name}", fold.accuracy(first)
        if name not in ("before the projection", "all depths"):
            continue
        for share in OWN_SHARES:
            scores = quadratic(train, labels, held, fold.classes, discriminant.penalty, share)
            title = f"quadratic discriminant, {share:.0%} of each covariance its class's own"
            yield f"{title} | {name}", fold.accuracy(scores)
        for count in RANDOM:
            expand = expansion(train, count)
            ridge = fit_ridge(expand(train), labels, fold.classes, fold.left_out_rows)
            second = scores_of(ridge, expand(held))
            weights = mix([discriminant.left_out, ridge.left_out], labels[fold.left_out_rows])
            yield f"regression with {count:,} random features | {name}", fold.accuracy(second)
            yield f"both, mixed ({count:,}) | {name}", fold.accuracy(weights[0] * first + weights[1] * second)


def quadratic(train: Tensor, labels: Tensor, held: Tensor, classes: int, ridge: float, share: float) -> Tensor:
    """Scores (B, C) of a discriminant whose covariances are (1 − share) of the pooled and `share` of the class's own.

    In coordinates in which (1 − share) · pooled + ridge is the identity, that of a class is I + ZᵀZ with few rows Z, so
    its inverse and determinant need a matrix as small as the class has pictures:
    (I + ZᵀZ)⁻¹ = I − Zᵀ (I + ZZᵀ)⁻¹ Z,  det(I + ZᵀZ) = det(I + ZZᵀ).
    """
    rows, queries = train.double(), held.double()
    means = torch.stack([rows[labels == label].mean(0) for label in range(classes)])
    apart = rows - means[labels]
    pooled = apart.T @ apart / max(1, len(rows) - classes)
    values, basis = torch.linalg.eigh(pooled)
    root = ((1 - share) * values.clamp(min=0) + ridge * pooled.trace() / len(pooled)).rsqrt()
    queries, means, apart = (part @ basis * root for part in (queries, means, apart))
    columns = []
    for label in range(classes):
        own = apart[labels == label] * (share / max(1, int((labels == label).sum()) - 1)) ** 0.5
        inner = torch.eye(len(own), dtype=own.dtype) + own @ own.T
        away = queries - means[label]
        within = own @ away.T
        distance = away.square().sum(1) - (within * torch.linalg.solve(inner, within)).sum(0)
        columns.append(-0.5 * (distance + torch.logdet(inner)))
    return torch.stack(columns, dim=1)


def scores_of(head: LDA | Head, rows: Tensor) -> Tensor:
    return rows.double() @ head.weight + head.bias


def expansion(train: Tensor, count: int) -> Callable[[Tensor], Tensor]:
    """As `Strata.expand`: standardised features and random ReLU features of them."""
    scale = 1 / (train.square().mean(0).sqrt().clamp(min=1e-6) * train.shape[1] ** 0.5)
    directions = torch.randn(train.shape[1], count, generator=torch.Generator().manual_seed(0))

    def expand(rows: Tensor) -> Tensor:
        scaled = rows * scale
        return torch.cat([scaled, torch.relu(scaled @ directions) / count**0.5], dim=1)

    return expand


def novelty(clip: CLIP, data: Dataset, fold: int) -> Iterator[tuple[str, float]]:
    """Scores of strangeness, and the area under the ROC curve of each: held-out pictures of unknown against known."""
    order = torch.randperm(len(data.classes), generator=torch.Generator().manual_seed(fold)).tolist()
    known = sorted(order[: round(KNOWN * len(order))])

    def inside(part: PictureSet) -> PictureSet:
        rows = torch.nonzero(torch.isin(part.labels, torch.tensor(known))).flatten()
        return part.subset(rows, torch.searchsorted(torch.tensor(known), part.labels[rows]))

    names = [data.classes[label] for label in known]
    small = replace(data, classes=names, train=inside(data.train), test=inside(data.test))
    experiment = Experiment("strata", data=small, tasks=1, device="cpu", cache=LoadCache(backbones={"mini": clip}))
    experiment.learn(next(iter(experiment)))
    method = experiment.method
    assert isinstance(method, Strata)
    pictures = Reader(clip, cache_folder()).open(data.test)
    strange = ~torch.isin(pictures.labels, torch.tensor(known))
    logits = method.logits(pictures)
    ridge = method.ridge_scores(method.memory.unit(pictures.levels)) * method.weights[1]
    yield "relative distance (Strata's)", auc(method.novelty(pictures), strange)
    yield "energy of the regression", auc(-ridge.logsumexp(1), strange)
    yield "energy of the mix", auc(-logits.logsumexp(1), strange)
    yield "highest logit of the mix", auc(-logits.amax(1), strange)
    yield "highest probability of the mix", auc(-logits.softmax(1).amax(1), strange)


def auc(scores: Tensor, positive: Tensor) -> float:
    """The chance that a positive has a higher score than a negative; a tie counts half."""
    high, low = scores[positive].double(), scores[~positive].double().sort().values
    below, upto = torch.searchsorted(low, high), torch.searchsorted(low, high, right=True)
    return float((below + upto).double().mean() / (2 * len(low)))


def combined(kept: Sequence[dict[str, Any]], what: str) -> str:
    """Markdown: a row for each head or score, a column for each measurement: the mean over folds and, where there are
    several, its standard deviation."""
    titles, digits = TITLES[what]
    lines = []
    for name in dict.fromkeys(name for each in kept for name in each[what]):
        cells = []
        for each in kept:
            values = each[what].get(name, [])
            spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.{digits}f}{spread}" if values else "–")
        lines.append([*name.split(" | "), *cells])
    return markdown_table([*titles, *(each["title"] for each in kept)], lines)


def read_kept(folder: Path) -> list[dict[str, Any]]:
    """What `--keep` wrote to this folder."""
    return [json.loads(read_text(path)) for path in sorted(folder.glob("*.json"))]


def measure(data: str, root: Path | None, hold_out: int, shots: int | None, folds: int) -> dict[str, Any]:
    """Everything that is printed, for one dataset."""
    clip = load_clip("mini")
    found: dict[str, Any] = {"title": "", "heads": defaultdict(list), "novelty": defaultdict(list)}
    for fold in range(folds):
        pictures = open_dataset(data, root, {}).hold_out(hold_out, fold)
        pictures = pictures if shots is None else pictures.shrink(shots, fold)
        for name, value in heads(Fold(clip, pictures)):
            found["heads"][name].append(round(value, 4))
        for name, value in novelty(clip, pictures, fold):
            found["novelty"][name].append(round(value, 5))
    few = f"{shots} to learn, " if shots else ""
    found["title"] = f"{data} ({few}{hold_out} held out per class; {folds} fold{'s' * (folds > 1)})"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m reproduce.held_out", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="emoji")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--hold-out", type=int, default=1, help="training pictures of each class that are held out")
    parser.add_argument("--shots", type=int, help="at most this many pictures of each class to learn")
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--keep", type=Path, metavar="FILE.json", help="write the numbers to this file, too")
    options = parser.parse_args()
    found = measure(options.data, options.data_root, options.hold_out, options.shots, options.folds)
    if options.keep is not None:
        write_json(options.keep, found)
    print(combined([found], "heads"), end="\n\n")
    print(combined([found], "novelty"))


if __name__ == "__main__":
    main()

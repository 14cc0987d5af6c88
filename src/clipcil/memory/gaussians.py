"""One Gaussian per class, stored in the feature space of its task and transported to the current one only for sampling.

A class is (μ, B, ρ, s): its mean, rows B with S = BᵀB, and Σ = (1−ρ) BᵀB + s I (see `ledoit_wolf`). When the tower
changes, every stored Gaussian becomes N(Tμ + b, T Σ Tᵀ). Classes learnt between two changes share a *space*, which has
one pair (M, c): M = T_j⋯T₁ and c accumulated. So calibration costs one d×d product per old space and nothing per class.
The current space has no pair: a method whose tower is frozen never stores or multiplies a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from clipcil.memory.ledoit_wolf import SPREAD_FLOOR, Summary, floor_level, summarise, union
from clipcil.memory.rows import SizedByState, check_rows, without

MANY = 8
"""From this many draws per class on, one matrix product per class is faster than one weighted gather for all draws."""


class AffineMap(NamedTuple):
    """A map between feature spaces, x ↦ T x + b: matrix T (d, d), offset b (d,)."""

    matrix: Tensor
    offset: Tensor

    def __call__(self, points: Tensor) -> Tensor:
        """Map `points` (..., d)."""
        return points @ self.matrix.T + self.offset


class GaussianMemory(SizedByState):
    """Class Gaussians that can be transported when the tower changes. Statistics and maps stay float64 under any cast.

    It has C classes with R rows in all, and P older spaces. The first features or the loaded state set d.
    """

    origin_means: Annotated[Tensor, "C d", torch.float64]  # in the space of origin
    rows: Annotated[Tensor, "R d", torch.float64]  # B of every class, one class after another
    ranks: Annotated[Tensor, "C", torch.int64]  # how many rows each class has
    shrinkages: Annotated[Tensor, "C", torch.float64]  # ρ
    noises: Annotated[Tensor, "C", torch.float64]  # s
    counts: Annotated[Tensor, "C", torch.int64]  # pictures seen
    task_of: Annotated[Tensor, "C", torch.int64]  # which call of `add` brought the class
    space_of: Annotated[Tensor, "C", torch.int64]  # row of `matrices`, or P for the current space
    matrices: Annotated[Tensor, "P d d", torch.float64]  # M of every older space
    offsets: Annotated[Tensor, "P d", torch.float64]  # c of every older space
    tasks: Annotated[Tensor, "", torch.int64]  # calls of `add` so far
    _sampler: Sampler | None = None  # made from the state for the first draw after a change

    def __len__(self) -> int:
        return len(self.origin_means)

    @torch.no_grad()
    def add(self, groups: Sequence[Tensor]) -> None:
        """Learn the classes of a new task.

        A class without spread (one picture, or copies of one) has S = 0 and would be replayed as one vector. It gets
        the isotropic spread of its neighbours: the average Tr(S)/d of the other classes of the task, else of the
        memory.

        Args:
            groups: (n_c, d) features of each new class in the current space.
        """
        summaries = [summarise(group.to(self.rows.device)) for group in groups]
        self._insert(len(self), summaries, int(self.tasks))
        self.tasks = self.tasks + 1  # not in place: a state_dict taken earlier must not change

    @torch.no_grad()
    def transport(self, map: AffineMap) -> None:
        """Transport all classes by a map x ↦ T x + b: (M, c) ← (T M, T c + b), and (T, b) for the current space."""
        matrix, offset = map.matrix.to(self.matrices), map.offset.to(self.offsets)
        if not len(self):
            return
        new = int((self.space_of == len(self.matrices)).any())  # 0 or 1: whether the current space has classes
        self.offsets = torch.cat([self.offsets @ matrix.T + offset, offset.expand(new, -1)])
        self.matrices = torch.cat([matrix @ self.matrices, matrix.expand(new, -1, -1)])
        self._sampler = None

    @torch.no_grad()
    def shift(self, offsets: Tensor) -> None:
        """Move the mean of each class by its own offset (C, d); covariances stay. Not after a transport by maps."""
        if len(self.matrices):
            raise ValueError("a memory that was transported by maps cannot be shifted class by class")
        self.origin_means = self.origin_means + offsets.to(self.origin_means)
        self._sampler = None

    @torch.no_grad()
    def fold(self, keep: int) -> None:
        """Move the classes of the oldest spaces into the current space, so that at most `keep` maps (M, c) are stored.

        A stream of many small tasks would otherwise store one d×d matrix per task. Means and rows are transported
        exactly. The isotropic part s M Mᵀ becomes s tr(M Mᵀ)/d · I, which is exact where M is a scaled rotation.
        """
        spaces = len(self.matrices)
        surplus = max(0, spaces - keep)
        owner = torch.arange(len(self), device=self.rows.device).repeat_interleave(self.ranks)
        rows, noises, moved = self.rows.clone(), self.noises.clone(), self.space_of < surplus
        for space in range(surplus):
            matrix, members = self.matrices[space], self.space_of == space
            rows[members[owner]] = rows[members[owner]] @ matrix.T
            noises[members] *= (matrix @ matrix.T).diagonal().mean()
        self.origin_means = torch.where(moved[:, None], self.means(), self.origin_means)
        self.rows, self.noises = rows, noises
        self.space_of = torch.where(moved, spaces, self.space_of) - surplus
        self.matrices, self.offsets = self.matrices[surplus:].clone(), self.offsets[surplus:].clone()
        self._sampler = None

    def moments(self, index: int) -> tuple[Tensor, Tensor]:
        """Mean (d,) and dense covariance (d, d) of a class in the current space, float64."""
        summary = self._transported(index)
        cov = (1 - self.shrinkages[index]) * (summary.rows.T @ summary.rows)
        space = int(self.space_of[index])
        if space == len(self.matrices):
            cov.diagonal().add_(self.noises[index])
            return summary.mean.clone(), cov
        matrix = self.matrices[space]
        return summary.mean, cov + self.noises[index] * (matrix @ matrix.T)

    @torch.no_grad()
    def means(self) -> Tensor:
        """Means of all classes in the current space: (C, d) float64."""
        means = self.origin_means.clone()
        for space in range(len(self.matrices)):
            members = self.space_of == space
            means[members] = means[members] @ self.matrices[space].T + self.offsets[space]
        return means

    def sample(self, classes: Tensor) -> Tensor:
        """Draw from class Gaussians with torch's global generator (see `Sampler.draw`).

        Args:
            classes: (N,) class of each draw, any order and repetition; on the host, so that a GPU need not wait.

        Returns:
            (N, d) float32 in the current space, on the memory's device.
        """
        if self._sampler is None:
            weights = (1 - self.shrinkages).sqrt().float().repeat_interleave(self.ranks)  # (R,)
            self._sampler = Sampler(
                rows=self.rows.float() * weights[:, None],
                starts=torch.cat([torch.zeros(1, dtype=torch.int64), self.ranks.cpu().cumsum(0)]),
                deviations=self.noises.sqrt().float()[:, None],
                means=self.means().float(),
                matrices=self.matrices.float(),
                spaces=self.space_of.cpu(),
                rank=self.space_of.cpu().argsort(stable=True).argsort(),
            )
        return self._sampler.draw(classes)

    @torch.no_grad()
    def merge(self, index: int, features: Tensor) -> None:
        """Add pictures to a known class: mean and S become those of the union.

        The class moves to the current space, with its old pictures as the map transported them.

        Args:
            index: Label of the class.
            features: (n, d) of its new pictures in the current space.
        """
        merged = union(self._transported(index), features)
        task = int(self.task_of[index])
        self.remove(index)
        self._insert(index, [merged], task)

    @torch.no_grad()
    def remove(self, index: int) -> None:
        """Forget a class; the labels of the classes after it move down by one."""
        start = int(self.ranks[:index].sum())
        self.rows = without(self.rows, start, int(self.ranks[index]))
        for name, (axes, _) in self.layout.items():
            if axes.startswith("C"):
                setattr(self, name, without(getattr(self, name), index))
        old = len(self.matrices)
        used = torch.unique(self.space_of[self.space_of < old])
        self.space_of = torch.searchsorted(used, self.space_of)  # the current space comes after all others
        self.matrices, self.offsets = self.matrices[used], self.offsets[used]
        self._sampler = None

    def _insert(self, index: int, summaries: Sequence[Summary], task: int) -> None:
        """Put classes of the current space before class `index`."""
        dim = len(summaries[0].mean)
        if not self.origin_means.shape[1]:
            self.origin_means = self.rows = self.offsets = self.rows.new_zeros(0, dim)
            self.matrices = self.matrices.new_zeros(0, dim, dim)
        neighbours = self._level_of_neighbours(summaries)
        shapes = [(s.shrinkage, s.shrinkage * s.level) if s.has_spread else (1.0, neighbours) for s in summaries]
        same = (task, len(self.matrices))
        numbers = [
            [float(rho), float(noise), len(s.rows), s.count, *same]
            for s, (rho, noise) in zip(summaries, shapes, strict=True)
        ]
        columns = torch.tensor(numbers, dtype=torch.float64).T
        self._splice("rows", int(self.ranks[:index].sum()), torch.cat([summary.rows for summary in summaries]))
        self._splice("origin_means", index, torch.stack([summary.mean for summary in summaries]))
        for name, column in zip(("shrinkages", "noises", "ranks", "counts", "task_of", "space_of"), columns):
            self._splice(name, index, column)
        self._sampler = None

    def _splice(self, name: str, at: int, new: Tensor) -> None:
        value: Tensor = getattr(self, name)
        setattr(self, name, torch.cat([value[:at], new.to(value), value[at:]]))

    def _level_of_neighbours(self, summaries: Sequence[Summary]) -> Tensor:
        """Average variance per dimension: of the new classes, else of the stored ones, else the floor."""
        levels = [summary.level for summary in summaries if summary.has_spread]
        if levels:
            return torch.stack(levels).mean()
        owner = torch.arange(len(self), device=self.rows.device).repeat_interleave(self.ranks)
        stored = self.noises.new_zeros(len(self)).index_add_(0, owner, self.rows.square().mean(1))
        stored = stored[stored > SPREAD_FLOOR * self.origin_means.square().mean(1)]
        return stored.mean() if len(stored) else torch.stack([floor_level(s.mean) for s in summaries]).mean()

    def _transported(self, index: int) -> Summary:
        """The unshrunk statistics of a class in the current space."""
        start, space = int(self.ranks[:index].sum()), int(self.space_of[index])
        mean, rows = self.origin_means[index], self.rows[start : start + int(self.ranks[index])]
        if space < len(self.matrices):
            mean, rows = self.matrices[space] @ mean + self.offsets[space], rows @ self.matrices[space].T
        level = rows.square().sum() / len(mean)
        return Summary(mean, rows, level, self.shrinkages[index], int(self.counts[index]))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GaussianMemory:
        """Follow the module to another device, but never to another dtype: `half()` must not round the statistics."""
        device = fn(torch.empty(0, dtype=torch.float64, device=self.rows.device)).device
        self._sampler = None
        super()._apply(lambda tensor: tensor.to(device), recurse)  # type: ignore[no-untyped-call]
        return self

    def check_state(self) -> None:
        self._sampler = None
        super().check_state()
        check_rows(self.rows, self.ranks)
        if bool(((self.space_of < 0) | (self.space_of > len(self.matrices)) | (self.counts < 1)).any()):
            raise ValueError("a class of a space that does not exist, or of no picture")


class Sampler(NamedTuple):
    """The class Gaussians prepared for sampling: shrunk, in float32; indices on the host."""

    rows: Tensor  # (R, d): √(1−ρ) B of all classes, one class after another
    starts: Tensor  # (C + 1,): class c owns rows starts[c] : starts[c + 1]
    deviations: Tensor  # (C, 1): √s
    means: Tensor  # (C, d): transported, Mμ + c
    matrices: Tensor  # (P, d, d): M of the older spaces
    spaces: Tensor  # (C,): row of `matrices`, or P where M = I
    rank: Tensor  # (C,): the place of each class when sorted by space

    @torch.no_grad()
    def draw(self, classes: Tensor) -> Tensor:
        """One draw for each entry of `classes` (N,), in any order: (N, d), from torch's global generator.

            z = (Mμ + c) + M (√(1−ρ) Bᵀε₁ + √s ε₂),    ε₁ ~ N(0, I_r), ε₂ ~ N(0, I_d)

        Draws are sorted by space and class, so that an older space is one product with its M. Rows are not copied or
        padded, however different their numbers. Only the deviation from the mean passes M in float32; the mean was
        transported in float64.
        """
        device, dtype, dim = self.rows.device, self.rows.dtype, self.rows.shape[1]
        classes = classes.to("cpu", torch.int64)
        order = self.rank[classes].argsort(stable=True)
        classes = classes[order]
        on_device = classes.to(device, non_blocking=True)
        draws = torch.randn(len(classes), dim, dtype=dtype, device=device) * self.deviations[on_device]
        with torch.autocast(device.type, enabled=False):  # statistics keep their precision in mixed-precision training
            self._mix_rows(classes, draws)
            spaces, lengths = torch.unique_consecutive(self.spaces[classes], return_counts=True)
            for space, part in zip(spaces.tolist(), torch.split(draws, lengths.tolist())):
                if space < len(self.matrices):
                    part.copy_(part @ self.matrices[space].T)
        draws += self.means[on_device]
        result = torch.empty_like(draws)
        result[order.to(device, non_blocking=True)] = draws
        return result

    def _mix_rows(self, classes: Tensor, draws: Tensor) -> None:
        """Add √(1−ρ) Bᵀε₁ to each of `draws`; `classes` (N,) are on the host and sorted."""
        widths = self.starts.diff()[classes]  # (N,): the rank of each draw's class
        ends = widths.cumsum(0)
        weights = torch.randn(int(widths.sum()), dtype=draws.dtype, device=draws.device)  # every ε₁, one after another
        present, repeats = torch.unique_consecutive(classes, return_counts=True)
        if len(classes) < MANY * len(present):
            first = self.starts[classes] - ends + widths
            members = first.repeat_interleave(widths) + torch.arange(len(weights))  # row of B for each weight
            bags = (members.to(draws.device), self.rows, (ends - widths).to(draws.device))
            draws += embedding_bag(*bags, mode="sum", per_sample_weights=weights)
            return
        starts = self.starts.tolist()
        used = (repeats * self.starts.diff()[present]).tolist()
        parts = torch.split(draws, repeats.tolist()), torch.split(weights, used)
        for c, own_draws, own_weights in zip(present.tolist(), *parts):
            own_draws.addmm_(own_weights.view(len(own_draws), -1), self.rows[starts[c] : starts[c + 1]])

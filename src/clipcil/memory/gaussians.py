"""One Gaussian per class, stored in the feature space of its task and transported to the current one only for sampling.

A class is (μ, B, ρ, s): its mean, rows B with S = BᵀB, and Σ = (1−ρ) BᵀB + s I (see `ledoit_wolf`). When the tower
changes, every stored Gaussian should become N(Tμ + b, T Σ Tᵀ). Instead of changing the classes, each *space* (features
of the tower between two changes, shared by every class learnt then) keeps one pair (M, c): M = T_j⋯T₁ and c
accumulated. Calibration costs one d×d product per old space, nothing per class; the current space needs no pair at all,
so a method whose tower is frozen never stores or multiplies a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from clipcil.memory.ledoit_wolf import SPREAD_FLOOR, Summary, floor_level, summarise, union
from clipcil.memory.rows import SizedByState
from clipcil.memory.sampler import Sampler


class AffineMap(NamedTuple):
    """A map between feature spaces, x ↦ T x + b: matrix T (d, d), offset b (d,)."""

    matrix: Tensor
    offset: Tensor

    def __call__(self, points: Tensor) -> Tensor:
        """Map `points` (..., d)."""
        return points @ self.matrix.T + self.offset


class GaussianMemory(SizedByState):
    """Class Gaussians that can be transported when the tower changes. Statistics and maps stay float64 under any cast.

    `dim` may be left out: it is taken from the first features or from the file that is loaded.
    """

    rows_of: ClassVar = {"rows": "ranks"}
    alike: ClassVar = (
        ("origin_means", "ranks", "shrinkages", "noises", "counts", "task_of", "space_of"),
        ("matrices", "offsets"),
    )
    origin_means: Tensor  # (C, d): in the space of origin
    rows: Tensor  # (R, d): B of every class, one class after another
    ranks: Tensor  # (C,) int64: how many rows each class has
    shrinkages: Tensor  # (C,): ρ
    noises: Tensor  # (C,): s
    counts: Tensor  # (C,) int64: pictures seen
    task_of: Tensor  # (C,) int64: which call of `add` brought the class
    space_of: Tensor  # (C,) int64: row of `matrices`, or P for the current space
    matrices: Tensor  # (P, d, d): M of every older space
    offsets: Tensor  # (P, d): c
    tasks: Tensor  # 0-d int64: calls of `add` so far

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        for name in ("origin_means", "rows", "offsets"):
            self.register_buffer(name, torch.zeros(0, dim, dtype=torch.float64))
        for name in ("shrinkages", "noises"):
            self.register_buffer(name, torch.zeros(0, dtype=torch.float64))
        for name in ("ranks", "counts", "task_of", "space_of"):
            self.register_buffer(name, torch.zeros(0, dtype=torch.int64))
        self.register_buffer("matrices", torch.zeros(0, dim, dim, dtype=torch.float64))
        self.register_buffer("tasks", torch.zeros((), dtype=torch.int64))
        self._samplers: dict[torch.dtype, Sampler] = {}
        self._shrunk_rows: dict[torch.dtype, Tensor] = {}  # √(1−ρ) B
        self._means: Tensor | None = None
        self._squared: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.origin_means)

    def count(self, index: int) -> int:
        """How many pictures class `index` was learnt from."""
        return int(self.counts[index])

    @torch.no_grad()
    def add(self, groups: Sequence[Tensor]) -> None:
        """Learn the classes of a new task.

        A class without spread (one picture, or copies of one) has S = 0; it gets the isotropic spread of its neighbours
        (the average Tr(S)/d of the other classes of the task, else of the memory), because classes of one dataset are
        about equally wide and a point would be replayed as one vector.

        Args:
            groups: (n_c, d) features of each new class in the current space.
        """
        summaries = [summarise(group.to(self.rows.device)) for group in groups]
        self._insert(len(self), summaries, int(self.tasks))
        self.tasks = self.tasks + 1  # not in place: a state_dict taken earlier must not change

    @torch.no_grad()
    def transport(self, map: AffineMap) -> None:
        """Transport all that is stored by a map x ↦ T x + b: (M, c) ← (T M, T c + b) for every space.

        Classes of the current space are in a space (T, b) after it.
        """
        matrix, offset = map.matrix.to(self.matrices), map.offset.to(self.offsets)
        if matrix.shape != (self._dim, self._dim) and len(self):
            raise ValueError(f"a map of shape {tuple(matrix.shape)} cannot carry features of {self._dim} dimensions")
        old = len(self.matrices)
        total = old + bool((self.space_of == old).any())
        matrices = matrix.new_empty(total, *matrix.shape)
        torch.matmul(matrix, self.matrices, out=matrices[:old])
        matrices[old:] = matrix
        self.offsets = torch.cat([self.offsets @ matrix.T + offset, offset.expand(total - old, -1)])
        self.matrices = matrices
        self._forget_derived(rows=False)

    @torch.no_grad()
    def shift(self, offsets: Tensor) -> None:
        """Move the mean of each class by its own offset (C, d); covariances stay.

        Raises:
            ValueError: The memory was transported by maps.
        """
        if len(self.matrices):
            raise ValueError("a memory that was carried by maps cannot be shifted class by class")
        self.origin_means = self.origin_means + offsets.to(self.origin_means)
        self._forget_derived()

    @torch.no_grad()
    def fold(self, keep: int) -> float:
        """Move the classes of the oldest spaces into the current space, so that at most `keep` maps (M, c) are stored.

        A stream of many small tasks would otherwise store one d×d matrix per task. Means and rows are transported
        exactly: n·d² operations per class, once. The isotropic part s M Mᵀ becomes s tr(M Mᵀ)/d · I, which is exact
        where M is a scaled rotation.

        Returns:
            The largest relative error ‖M Mᵀ − tr(M Mᵀ)/d I‖ / ‖M Mᵀ‖ (Frobenius) of what was folded; 0 for nothing.
        """
        surplus = len(self.matrices) - keep
        if surplus <= 0:
            return 0.0
        worst, owner = 0.0, torch.arange(len(self), device=self.rows.device).repeat_interleave(self.ranks)
        means, rows, noises = self.origin_means.clone(), self.rows.clone(), self.noises.clone()
        for space in range(surplus):
            matrix, members = self.matrices[space], self.space_of == space
            square = matrix @ matrix.T
            level = square.diagonal().mean()
            isotropic = level * torch.eye(self._dim).to(square)
            worst = max(worst, float((square - isotropic).norm() / square.norm()))
            means[members] = means[members] @ matrix.T + self.offsets[space]
            own = members[owner]
            rows[own] = rows[own] @ matrix.T
            noises[members] *= level
        self.origin_means, self.rows, self.noises = means, rows, noises
        today = len(self.matrices)
        self.space_of = torch.where(self.space_of < surplus, today, self.space_of) - surplus
        self.matrices, self.offsets = self.matrices[surplus:].clone(), self.offsets[surplus:].clone()
        self._forget_derived()
        return worst

    def moments(self, index: int) -> tuple[Tensor, Tensor]:
        """Mean (d,) and dense covariance (d, d) of a class in the current space, float64."""
        summary = self._carried(index)
        cov = (1 - self.shrinkages[index]) * (summary.rows.T @ summary.rows)
        space = int(self.space_of[index])
        if space < len(self.matrices):
            cov += self.noises[index] * self._square(space)
        else:
            cov.diagonal().add_(self.noises[index])
        return summary.mean.clone(), cov

    @torch.no_grad()
    def means(self) -> Tensor:
        """Means of all classes in the current space: (C, d) float64. Kept until the next change: do not write to it."""
        if self._means is None:
            carried = self.origin_means.clone()
            for space in range(len(self.matrices)):
                members = self.space_of == space
                carried[members] = carried[members] @ self.matrices[space].T + self.offsets[space]
            self._means = carried
        return self._means

    def sample(self, classes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw from class Gaussians with torch's global generator (see `Sampler.draw`).

        Args:
            classes: (N,) class of each draw, any order and repetition; on the host, so that a GPU need not wait.
            dtype: Of the result.

        Returns:
            (N, d) in the current space, on the memory's device.
        """
        compute = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        if compute not in self._samplers:
            self._samplers[compute] = self._sampler(compute)
        return self._samplers[compute].draw(classes).to(dtype)

    @torch.no_grad()
    def merge(self, index: int, features: Tensor) -> None:
        """Add pictures to a known class: mean and S become those of the union.

        The class moves to the current space, with its old pictures as the map transported them.

        Args:
            index: Label of the class.
            features: (n, d) of its new pictures in the current space.
        """
        merged = union(self._carried(index), features)
        task = int(self.task_of[index])
        self.remove(index)
        self._insert(index, [merged], task)

    @torch.no_grad()
    def remove(self, index: int) -> None:
        """Forget a class; the labels of the classes after it move down by one."""
        if not 0 <= index < len(self):
            raise IndexError(f"no class {index} among {len(self)}")
        start = int(self.ranks[:index].sum())
        self.rows = torch.cat([self.rows[:start], self.rows[start + int(self.ranks[index]) :]])
        for name in ("origin_means", "ranks", "shrinkages", "noises", "counts", "task_of", "space_of"):
            value = getattr(self, name)
            setattr(self, name, torch.cat([value[:index], value[index + 1 :]]))
        old = len(self.matrices)
        used = torch.unique(self.space_of[self.space_of < old])
        self.space_of = torch.searchsorted(used, self.space_of)  # the current space comes after all others
        self.matrices, self.offsets = self.matrices[used], self.offsets[used]
        self._forget_derived()

    @property
    def _dim(self) -> int:
        return self.origin_means.shape[1]

    def _insert(self, index: int, summaries: Sequence[Summary], task: int) -> None:
        """Put classes of the current space before class `index`."""
        if not summaries:
            return
        dim = len(summaries[0].mean)
        if not self._dim:
            for name in ("origin_means", "rows", "offsets"):
                setattr(self, name, getattr(self, name).new_zeros(0, dim))
            self.matrices = self.matrices.new_zeros(0, dim, dim)
        if any(len(summary.mean) != self._dim for summary in summaries):
            raise ValueError(f"features of {dim} dimensions do not fit a memory of {self._dim}")
        neighbours = self._level_of_neighbours(summaries)
        shapes = [(s.shrinkage, s.shrinkage * s.level) if s.spread else (1.0, neighbours) for s in summaries]
        start = int(self.ranks[:index].sum())
        self._splice("rows", start, torch.cat([summary.rows for summary in summaries]))
        self._splice("origin_means", index, torch.stack([summary.mean for summary in summaries]))
        self._splice("shrinkages", index, [shrinkage for shrinkage, _ in shapes])
        self._splice("noises", index, [noise for _, noise in shapes])
        self._splice("ranks", index, [len(summary.rows) for summary in summaries])
        self._splice("counts", index, [summary.count for summary in summaries])
        self._splice("task_of", index, [task] * len(summaries))
        self._splice("space_of", index, [len(self.matrices)] * len(summaries))
        self._forget_derived()

    def _splice(self, name: str, at: int, new: Tensor | Sequence[float | Tensor]) -> None:
        value: Tensor = getattr(self, name)
        entries = new if isinstance(new, Tensor) else torch.tensor([float(entry) for entry in new], dtype=torch.float64)
        setattr(self, name, torch.cat([value[:at], entries.to(value), value[at:]]))

    def _level_of_neighbours(self, summaries: Sequence[Summary]) -> Tensor:
        """Average variance per dimension: of the new classes, else of the stored ones, else the floor."""
        levels = [summary.level for summary in summaries if summary.spread]
        if levels:
            return torch.stack(levels).mean()
        owner = torch.arange(len(self), device=self.rows.device).repeat_interleave(self.ranks)
        stored = self.noises.new_zeros(len(self)).index_add_(0, owner, self.rows.square().mean(1))
        stored = stored[stored > SPREAD_FLOOR * self.origin_means.square().mean(1)]
        return stored.mean() if len(stored) else torch.stack([floor_level(s.mean) for s in summaries]).mean()

    def _square(self, space: int) -> Tensor:
        """M Mᵀ of a space, kept until another is asked for: classes of a task are asked for one after another, and a
        d³ product for each of them would dominate the cost of measuring the drift of many."""
        if self._squared is None or self._squared[0] != space:
            self._squared = space, self.matrices[space] @ self.matrices[space].T
        return self._squared[1]

    def _carried(self, index: int) -> Summary:
        """The unshrunk statistics of a class in the current space."""
        start, space = int(self.ranks[:index].sum()), int(self.space_of[index])
        mean, rows = self.origin_means[index], self.rows[start : start + int(self.ranks[index])]
        if space < len(self.matrices):
            mean, rows = self.matrices[space] @ mean + self.offsets[space], rows @ self.matrices[space].T
        level = rows.square().sum() / self._dim
        return Summary(mean, rows, level, self.shrinkages[index], self.count(index))

    def _sampler(self, dtype: torch.dtype) -> Sampler:
        if dtype not in self._shrunk_rows:
            weights = (1 - self.shrinkages).sqrt().to(dtype).repeat_interleave(self.ranks)  # (R,)
            self._shrunk_rows[dtype] = self.rows.to(dtype) * weights[:, None]
        return Sampler(
            rows=self._shrunk_rows[dtype],
            starts=torch.cat([torch.zeros(1, dtype=torch.int64), self.ranks.cpu().cumsum(0)]),
            deviations=self.noises.sqrt().to(dtype)[:, None],
            means=self.means().to(dtype),
            matrices=self.matrices.to(dtype),
            spaces=self.space_of.cpu(),
            rank=self.space_of.cpu().argsort(stable=True).argsort(),
        )

    def _forget_derived(self, rows: bool = True) -> None:
        """Drop what was computed from the state; `rows=False` where only maps changed and the classes did not."""
        self._means = self._squared = None
        self._samplers.clear()
        if rows:
            self._shrunk_rows.clear()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GaussianMemory:
        """Follow the module to another device, but never to another dtype: `half()` must not round the statistics."""
        device = fn(torch.empty(0, dtype=torch.float64, device=self.rows.device)).device
        self._forget_derived()
        super()._apply(lambda tensor: tensor.to(device), recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self._forget_derived()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def check_state(self) -> None:
        super().check_state()
        if {*self.rows.shape[1:], *self.offsets.shape[1:], *self.matrices.shape[1:]} != {self._dim}:
            raise ValueError(f"means of {self._dim} dimensions with rows or maps of others")
        if bool(((self.space_of < 0) | (self.space_of > len(self.matrices))).any()) or bool((self.counts < 1).any()):
            raise ValueError("a class of a space that there is not, or of no picture")

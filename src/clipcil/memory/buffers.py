"""A module whose buffers take their sizes from the state that is loaded."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn


class SizedByState(nn.Module):
    """An empty memory can load the state of any other: its buffers get the shapes that the state has."""

    rows_of: ClassVar[dict[str, str]] = {}
    """Buffers whose rows are sorted by class, and the buffer with the number of rows of each class."""
    alike: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Buffers that have as many rows as each other, such as one for each class."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, value in list(self.named_buffers(recurse=False)):
            found = state_dict.get(prefix + name)
            if found is not None and found.ndim == value.ndim:  # another number of dimensions is reported by loading
                setattr(self, name, value.new_empty(found.shape))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.check_state()

    def check_state(self) -> None:
        """Raise ValueError unless the buffers fit each other: a file may say anything."""
        for rows, counts in self.rows_of.items():
            check_rows(getattr(self, rows), getattr(self, counts))
        for group in self.alike:
            lengths = {name: len(getattr(self, name)) for name in group}
            if len(set(lengths.values())) > 1:
                raise ValueError(f"buffers of different lengths: {lengths}")


def check_rows(rows: Tensor, counts: Tensor) -> None:
    """Raise ValueError unless rows (R, …) are those of classes with `counts` (C,) rows: a file may say anything."""
    if counts.ndim != 1 or rows.ndim != 2 or bool((counts < 0).any()) or int(counts.sum()) != len(rows):
        raise ValueError(f"rows {tuple(rows.shape)} for classes of {counts.tolist()[:10]} rows")

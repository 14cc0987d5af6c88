"""The paper's tables as data: the printed numbers, and the settings of the same runs here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from clipcil.errors import UserError, nearest
from clipcil.storage import read_toml

BACKBONE = "openai/clip-vit-base-patch16"
"""The backbone of every number in the paper."""


@dataclass(frozen=True)
class Row:
    """A line of a table: its label, its method with settings, and the printed numbers."""

    label: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that define the row, also where they are the default."""
    last: tuple[float, ...] = ()
    """A_B for each dataset of the table; empty where the paper prints none."""
    average: tuple[float, ...] = ()
    """Ā likewise."""
    tasks: tuple[int, ...] = ()
    """Numbers of tasks that the row is measured with; empty: the table's."""
    for_tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings that the row has with one number of tasks, such as {"20": {"components": 5}}."""

    def settings_with(self, tasks: int | None) -> dict[str, Any]:
        """The settings that define the row with this number of tasks."""
        return {**self.settings, **self.for_tasks.get(str(tasks), {})}

    @property
    def decides(self) -> set[str]:
        """Names of the settings that define the row."""
        return {*self.settings, *(key for own in self.for_tasks.values() for key in own)}


@dataclass(frozen=True)
class PaperTable:
    """A table, or the values of the sensitivity study."""

    title: str
    tasks: int
    backbone: str
    datasets: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""
    orders: tuple[str, ...] = ()
    """Class orders that each row is measured with; empty: the one that is asked for."""


class PaperResult(NamedTuple):
    """The printed numbers of one method on one dataset."""

    table: str
    label: str
    last: float
    average: float | None


def table_names() -> list[str]:
    return sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))


@cache
def read_table(name: str) -> PaperTable:
    if name not in table_names():
        raise UserError(f"the paper has no table '{name}'{nearest(name, table_names())}")
    values = read_toml(Path(__file__).with_name(f"{name}.toml"), links=True)
    return TypeAdapter(PaperTable).validate_python(values)


def paper_result(method: str, settings: Mapping[str, Any], data: str, tasks: int, only: str = "") -> PaperResult | None:
    """The number that the paper prints for a run with these resolved settings, from the first table that has it.

    A row fits when every setting that defines it is the run's: DMC-OT without OT is not taken for DMC-OT. `only` names
    the one table to look into.
    """
    for name in [only] if only else table_names():
        table = read_table(name)
        if table.tasks != tasks or data not in table.datasets:
            continue
        place = table.datasets.index(data)
        for row in table.rows:
            same = all(settings.get(key) == value for key, value in row.settings.items())
            if row.last and row.method == method and same:
                return PaperResult(name, row.label, row.last[place], row.average[place] if row.average else None)
    return None

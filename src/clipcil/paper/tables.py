"""Reading the paper's tables, and finding the number it printed for a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from pydantic import TypeAdapter

from clipcil.errors import UserError, nearest
from clipcil.storage import read_toml

BACKBONE = "openai/clip-vit-base-patch16"
"""The backbone of every number in the paper."""


@dataclass(frozen=True)
class Row:
    """A line of a table: what it is called, which method with which settings it is, and what was printed."""

    label: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that make the row what it is; those of an ablation are spelt out even where they are the default."""
    last: tuple[float, ...] = ()
    """A_B for each dataset of the table; empty where the paper prints none."""
    average: tuple[float, ...] = ()
    """Ā likewise."""
    tasks: tuple[int, ...] = ()
    """Numbers of tasks the row is measured with; empty: the table's."""
    for_tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings that the row has with one number of tasks, such as {"20": {"components": 5}}."""

    def settings_with(self, tasks: int | None) -> dict[str, Any]:
        """The settings that make the row what it is with this number of tasks."""
        return {**self.settings, **self.for_tasks.get(str(tasks), {})}

    @property
    def decides(self) -> set[str]:
        """The settings that the row spells out."""
        return {*self.settings, *(key for own in self.for_tasks.values() for key in own)}


@dataclass(frozen=True)
class Sweep:
    """One axis of the sensitivity study."""

    symbol: str
    method: str
    key: str
    values: tuple[int | float, ...]
    tasks: tuple[int, ...] = ()
    """As of a row."""


@dataclass(frozen=True)
class PaperTable:
    name: str
    title: str
    tasks: int
    backbone: str
    datasets: tuple[str, ...]
    rows: tuple[Row, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    note: str = ""
    orders: tuple[str, ...] = ()
    """Class orders that each row is measured with; empty: the one that is asked for."""

    def all_rows(self) -> tuple[Row, ...]:
        """The rows; those of a sensitivity study are its sweeps, a row for each value."""
        swept = (
            Row(f"{sweep.symbol} = {value:g}", sweep.method, {sweep.key: value}, tasks=sweep.tasks)
            for sweep in self.sweeps
            for value in sweep.values
        )
        return (*self.rows, *swept)


@dataclass(frozen=True)
class PaperResult:
    """What the paper printed for one method on one dataset."""

    table: str
    label: str
    last: float | None
    average: float | None


def table_names() -> list[str]:
    files = (resources.files("clipcil") / "paper").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


@cache
def read_table(name: str) -> PaperTable:
    if name not in table_names():
        raise UserError(f"the paper has no table '{name}'{nearest(name, table_names())}")
    with resources.as_file(resources.files("clipcil") / "paper" / f"{name}.toml") as path:
        values = read_toml(path, links=True)
    return TypeAdapter(PaperTable).validate_python({"name": name, **values})


def paper_result(method: str, settings: Mapping[str, Any], data: str, tasks: int, only: str = "") -> PaperResult | None:
    """The number the paper printed for a run with these resolved settings, from the first table that has it.

    A row fits when every setting it spells out is the run's: DMC-OT without OT is not taken for DMC-OT. `only` names
    the one table to look into.
    """
    for name in [only] if only else table_names():
        table = read_table(name)
        if table.tasks != tasks or data not in table.datasets:
            continue
        place = table.datasets.index(data)
        for row in table.rows:
            if (
                row.last
                and row.method == method
                and all(settings.get(key) == value for key, value in row.settings.items())
            ):
                last, average = (values[place] if values else None for values in (row.last, row.average))
                return PaperResult(name, row.label, last, average)
    return None

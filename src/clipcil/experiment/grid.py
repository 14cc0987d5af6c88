"""Which runs a bench is made of: methods or rows of a paper's table × datasets × seeds, each fully resolved."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from clipcil.data.dataset import datasets
from clipcil.errors import UserError, nearest
from clipcil.experiment.spec import RunSpec, as_table, method_settings
from clipcil.methods.registry import find_method, methods
from clipcil.paper import Row, read_table
from clipcil.settings import build, merge, override, parse_words, within


@dataclass(frozen=True)
class Grid:
    """What was asked for."""

    table: str | None = None
    methods: tuple[str, ...] = ()
    """Names or patterns; empty or `all`: every row of the table, or every method."""
    data: tuple[str, ...] = ()
    """Datasets; empty: those of the table, or the embedded one."""
    only: tuple[str, ...] = ()
    """Patterns of methods, labels and datasets that cut the grid down."""
    seeds: int = 1
    roots: tuple[str, ...] = ()
    """A folder with a folder for each dataset, or words dataset=folder."""
    settings: tuple[str, ...] = ()
    """Words key=value for the methods; a method that has no such setting goes without it."""
    data_settings: tuple[str, ...] = ()
    """Words key=value for the datasets; a dataset that has no such option goes without it."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Choices outside the methods, as fields of `RunSpec`."""


@dataclass(frozen=True)
class Planned:
    """One run of the grid."""

    label: str
    spec: RunSpec
    config: Any
    folder: Path
    problem: str = ""
    """Why it cannot be run, where that is known before."""


def plan(grid: Grid, out: Path) -> list[Planned]:
    """Every run of the grid, dataset by dataset so that features are shared. Wrong names and values are refused."""
    within("seeds", grid.seeds, 1, 1000)
    table = read_table(grid.table) if grid.table else None
    rows = list(table.all_rows()) if table else [Row(kind.title, name) for name, kind in methods().items()]
    rows = _choose_rows(rows, grid.methods)
    data = known_datasets(grid.data) or (list(table.datasets) if table else ["emoji"])
    rows, data = _cut(rows, data, grid.only)
    check_settings(grid.settings, [row.method for row in rows])
    for key in (word.partition("=")[0].strip() for word in grid.settings):
        if any(key in row.settings for row in rows):
            raise UserError(f"the rows of {grid.table} decide '{key}' themselves; leave it out, or bench without table")
    run = {"tasks": table.tasks, "backbone": table.backbone, **grid.run} if table else dict(grid.run)
    if "increment" in run:
        run.pop("tasks", None)
    roots, options = data_roots(grid.roots, data), data_options(grid.data_settings, data)
    planned = []
    for name in data:
        for row in rows:
            for seed in range(grid.seeds):
                where = {"method": row.method, "data": name, "data_root": roots[name], "seed": seed}
                spec = build(RunSpec, {**run, **where, "data_options": options[name]})
                planned.append(resolve(row.label, spec, row.settings, grid.settings, out))
    return planned


def resolve(label: str, spec: RunSpec, settings: Mapping[str, Any], words: Sequence[str], out: Path) -> Planned:
    """The run with all its settings, and the folder that belongs to exactly them."""
    try:
        config = method_settings(spec, merge(parse_words(known_words(spec.method, words)), settings))
        text = json.dumps(as_table(spec, config), sort_keys=True)
    except UserError as error:
        return Planned(label, spec, None, out / f"{spec.data}-{spec.method}-seed{spec.seed}-refused", str(error))
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Planned(label, spec, config, out / f"{spec.data}-{spec.method}-seed{spec.seed}-{digest}")


def check_settings(words: Sequence[str], names: Iterable[str]) -> None:
    """Refuse a setting that none of the methods has, and a value that one of them does not take."""
    known = methods()
    kinds = {name: known[name] for name in names if name in known}
    for word in words:
        key = word.partition("=")[0].strip()
        owners = [kind for kind in kinds.values() if has_setting(kind.Config(), key)]
        parse_words([word])
        if not owners and kinds:
            every = sorted({f.name for kind in kinds.values() for f in dataclasses.fields(kind.Config)})
            raise UserError(f"none of the methods has a setting '{key}'{nearest(key, every)}")
        for kind in owners:
            override(kind.Config(), parse_words([word]))


def known_words(method: str, words: Sequence[str]) -> list[str]:
    config = find_method(method).Config()
    return [word for word in words if has_setting(config, word.partition("=")[0].strip())]


def has_setting(config: Any, key: str) -> bool:
    """Whether the dataclass instance has the (dotted) setting."""
    name, _, rest = key.partition(".")
    if not dataclasses.is_dataclass(config) or name not in {f.name for f in dataclasses.fields(config)}:
        return False
    return has_setting(getattr(config, name), rest) if rest else True


def data_roots(words: Sequence[str], data: Iterable[str]) -> dict[str, Path | None]:
    """The folder of each dataset: the one named for it, else the general folder's folder of its name, else that folder.

    An embedded dataset has none, whatever is given.
    """
    known = datasets()

    known_datasets(())  # fills the registry
    own = {name: Path(folder) for name, equals, folder in (word.partition("=") for word in words) if equals}
    for name in own:
        if name not in known:
            raise UserError(f"--data-root {name}=…: there is no dataset '{name}'{nearest(name, known)}")
    general = [Path(word) for word in words if "=" not in word]
    if len(general) > 1:
        raise UserError(f"--data-root names {len(general)} folders; give one, or write dataset=folder for each")
    found: dict[str, Path | None] = {}
    for name in data:
        root = own.get(name)
        if root is None and general and name in known and known[name].needs != "nothing":
            root = general[0] / name if (general[0] / name).exists() else general[0]
        found[name] = root
    return found


def data_options(words: Sequence[str], data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The options of each dataset among these words; a word that fits none of them is refused."""
    known = datasets()

    known_datasets(())
    kinds = {name: known[name].options() for name in data if name in known}
    for word in words:
        key = word.partition("=")[0].strip()
        if kinds and not any(has_setting(options, key) for options in kinds.values()):
            every = sorted({item.name for options in kinds.values() for item in dataclasses.fields(options)})
            raise UserError(f"none of the datasets has an option '{key}'{nearest(key, every)}")
    found: dict[str, dict[str, Any]] = {name: {} for name in data}
    for name, options in kinds.items():
        own = [word for word in words if has_setting(options, word.partition("=")[0].strip())]
        found[name] = parse_words(own)
        override(options, found[name])
    return found


def known_datasets(names: Sequence[str]) -> list[str]:
    known = datasets()
    for name in names:
        if name not in known:
            raise UserError(f"there is no dataset '{name}'{nearest(name, known)}")
    return list(dict.fromkeys(names))


def _choose_rows(rows: list[Row], patterns: Sequence[str]) -> list[Row]:
    if not patterns or "all" in patterns:
        return rows
    chosen = []
    for pattern in patterns:
        found = [row for row in rows if _fits(row, pattern)]
        if not found:
            names = dict.fromkeys(row.method for row in rows)
            raise UserError(f"there is no method '{pattern}' here{nearest(pattern, names)}")
        chosen += found
    return list({(row.method, row.label): row for row in chosen}.values())


def _cut(rows: list[Row], data: list[str], patterns: Sequence[str]) -> tuple[list[Row], list[str]]:
    """A pattern that fits datasets cuts those, one that fits methods or labels cuts those."""
    of_rows = [p for p in patterns if any(_fits(row, p) for row in rows)]
    of_data = [p for p in patterns if any(fnmatchcase(name, p) for name in data)]
    for pattern in patterns:
        if pattern not in of_rows and pattern not in of_data:
            known = [*dict.fromkeys(row.method for row in rows), *data]
            raise UserError(f"--only '{pattern}' fits no method and no dataset of the grid{nearest(pattern, known)}")
    if of_rows:
        rows = [row for row in rows if any(_fits(row, pattern) for pattern in of_rows)]
    if of_data:
        data = [name for name in data if any(fnmatchcase(name, pattern) for pattern in of_data)]
    return rows, data


def _fits(row: Row, pattern: str) -> bool:
    return fnmatchcase(row.method, pattern) or fnmatchcase(row.label.lower(), pattern.lower())

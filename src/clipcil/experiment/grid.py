"""Which runs a grid consists of: cases × datasets × class orders × seeds, each fully resolved."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from clipcil.data.dataset import datasets, find_dataset, own_folder
from clipcil.errors import UserError, nearest, quoted
from clipcil.experiment.spec import PER_RUN, Grid, RunSpec, as_table, method_settings, resolved
from clipcil.methods.registry import find_method, methods
from clipcil.paper import Row, read_table
from clipcil.settings import build, merge, nested, override, parse_words
from clipcil.storage import is_folder

SYMBOLS = {"M": "prompt_length", "β": "beta", "λ": "ortho", "lambda": "ortho"}
"""The paper's names of three settings of DMC-OT."""


@dataclass(frozen=True)
class Case:
    """A method with settings, as one line of a table or one point of a curve."""

    label: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    """Options of `RunSpec` that belong to the case."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a grid."""

    label: str
    spec: RunSpec
    config: Any
    folder: Path
    problem: str = ""
    """Why it cannot be run, where that is known before."""

    @property
    def table(self) -> dict[str, Any]:
        """Every option and setting, as `config.toml` holds them."""
        return as_table(self.spec, self.config)


def plan(grid: Grid) -> list[PlannedRun]:
    """Every run of a bench, dataset by dataset so that features are shared.

    Raises:
        UserError: A name or value is wrong.
    """
    table = read_table(grid.table) if grid.table else None
    rows = list(table.all_rows()) if table else [Row(kind.title, name) for name, kind in methods().items()]
    rows = _choose_rows(rows, grid.methods)
    data = known_datasets(grid.data) or (list(table.datasets) if table else ["emoji"])
    rows, data = _cut(rows, data, grid.only)
    for key in map(_key, grid.set):
        if any(key in row.decides for row in rows):
            raise UserError(f"the rows of {grid.table} decide '{key}' themselves; leave it out, or bench without table")
    run = {"tasks": table.tasks, "backbone": table.backbone, **grid.run} if table else dict(grid.run)
    if "increment" in run and "tasks" not in grid.run:
        run.pop("tasks", None)
    cases = []
    for row in rows:
        asked = not row.tasks or {"tasks", "increment"} & set(grid.run)
        for tasks in ({},) if asked else tuple({"tasks": number} for number in row.tasks):
            settings = row.settings_with(tasks.get("tasks", run.get("tasks")))
            cases.append(Case(row.label, row.method, settings, tasks))
    orders = grid.orders or (table.orders if table and "order" not in grid.run else ())
    return _expand(cases, data, replace(grid, orders=orders), run)


def plan_sweep(method: str, key: str, values: Sequence[str], grid: Grid) -> list[PlannedRun]:
    """A run for each dataset, value and seed; the label of each is its value.

    Args:
        method: Name of the method.
        key: A setting of the method, or an option of the run such as tasks or shots.
        values: Its values. Default: those of the paper's sensitivity study.
        grid: The rest.

    Raises:
        UserError: There is no such setting, or a value does not fit it.
    """
    config = find_method(method).Config()
    key = key if has_setting(config, key) else SYMBOLS.get(key, key)
    options = {item.name for item in dataclasses.fields(RunSpec)} - PER_RUN
    if not has_setting(config, key) and key not in options:
        known = [*(item.name for item in dataclasses.fields(config)), *sorted(options)]
        raise UserError(f"{method} has no setting '{key}'{nearest(key, known)}")
    chosen = list(dict.fromkeys(values)) or [f"{value:g}" for value in study_values(key)]
    if len(chosen) < 2:
        raise UserError(f"a sweep needs at least two values of '{key}'; write them one after the other")
    if has_setting(config, key):
        cases = [Case(value, method, nested({key: value})) for value in chosen]
        given = [f"--set {word}" for word in grid.set if _key(word) == key]
    else:
        cases = [Case(value, method, run={key: value}) for value in chosen]
        same = ("tasks", "increment") if key in ("tasks", "increment") else (key,)
        given = [f"--{name.replace('_', '-')}" for name in same if name in grid.run]
        given += ["--orders"] if key == "order" and grid.orders else []
    if given:
        raise UserError(f"the sweep itself decides '{key}'; leave out {given[0]}")
    planned = _expand(cases, known_datasets(grid.data) or ["emoji"], grid, grid.run)
    for each in planned:
        if each.problem:  # an invalid value of a sweep is refused, not reported as a failed run
            raise UserError(each.problem)
    return planned


def study_values(key: str) -> tuple[float, ...]:
    """The values that the paper's sensitivity study takes for a setting."""
    return next((sweep.values for sweep in read_table("sensitivity").sweeps if sweep.key == key), ())


def _expand(cases: Sequence[Case], data: Sequence[str], grid: Grid, run: Mapping[str, Any]) -> list[PlannedRun]:
    kinds, sources = methods(), datasets()
    configs = {case.method: kinds[case.method].Config() for case in cases if case.method in kinds}
    settings = _share_words(grid.set, configs, ("methods", "a setting"))
    defaults = {name: sources[name].options() for name in data if name in sources}
    options = _share_words(grid.data_options, defaults, ("datasets", "an option"))
    roots = data_roots(grid.data_root, data)
    planned = []
    for name in data:
        where = {"data": name, "data_root": roots[name], "data_options": options.get(name, {})}
        for case in cases:
            for order in [{"order": order} for order in grid.orders] or [{}]:
                for seed in range(grid.seeds):
                    own = {**case.run, **order, **where, "method": case.method, "seed": seed}
                    given = merge(settings.get(case.method, {}), case.settings)
                    planned.append(_resolve(case.label, build(RunSpec, {**run, **own}), given, grid.out))
    return planned


def _resolve(label: str, spec: RunSpec, settings: Mapping[str, Any], out: Path) -> PlannedRun:
    """The run with all its settings, and the folder that belongs to exactly them."""
    name = f"{spec.data}-{spec.method}-seed{spec.seed}"
    try:
        spec = resolved(spec)
        config = method_settings(spec, settings)
    except UserError as error:
        return PlannedRun(label, spec, None, out / f"{name}-refused", str(error))
    text = json.dumps(as_table(spec, config), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return PlannedRun(label, spec, config, out / f"{name}-{digest}")


def _share_words(words: Sequence[str], owners: Mapping[str, Any], called: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """The values among words key=value for each method or dataset: those for which it has a setting or option.

    Args:
        words: The words.
        owners: The defaults of each method or dataset.
        called: What an owner and a key are called in messages.

    Raises:
        UserError: None of the owners has a key, or one of them does not take a value.
    """
    pairs = [(word, _key(word)) for word in words]
    for word, key in pairs:
        parse_words([word])
        if owners and not any(has_setting(defaults, key) for defaults in owners.values()):
            every = sorted({item.name for defaults in owners.values() for item in dataclasses.fields(defaults)})
            raise UserError(f"none of the {called[0]} has {called[1]} '{key}'{nearest(key, every)}")
    found = {}
    for name, defaults in owners.items():
        found[name] = parse_words([word for word, key in pairs if has_setting(defaults, key)])
        override(defaults, found[name])  # all values at once: which one fits may depend on another
    return found


def _key(word: str) -> str:
    return word.partition("=")[0].strip()


def has_setting(config: Any, key: str) -> bool:
    """Whether the dataclass instance has the (dotted) setting."""
    name, _, rest = key.partition(".")
    if not dataclasses.is_dataclass(config) or name not in {f.name for f in dataclasses.fields(config)}:
        return False
    return has_setting(getattr(config, name), rest) if rest else True


def data_roots(words: Sequence[str], data: Iterable[str]) -> dict[str, Path | None]:
    """The folder of each dataset: the one named for it, else the general folder's folder of its name, else that folder.

    Paths are absolute, so that a run has the same folder however its data is named. An embedded dataset has none,
    whatever is given.
    """
    known = datasets()
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
            root = own_folder(name, general[0])
        found[name] = root.absolute() if root is not None else None
    return found


def known_datasets(names: Sequence[str]) -> list[str]:
    """The names, each once; an unknown one is refused."""
    for name in names:
        if name not in datasets() and is_folder(Path(name)):
            raise UserError(f"'{name}' is a folder; give --data folder --data-root {quoted(name)}")
        find_dataset(name)
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

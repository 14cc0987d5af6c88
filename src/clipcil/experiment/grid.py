"""Which runs a grid consists of: cases × datasets × class orders × seeds, each fully resolved."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from clipcil.data.dataset import datasets, find_dataset, named_dataset, own_folder
from clipcil.errors import UserError, nearest, quoted
from clipcil.experiment.spec import PER_RUN, Grid, RunSpec, as_table, method_settings, resolved
from clipcil.methods.registry import find_method, methods, named_method, own_methods
from clipcil.paper import Row, read_table
from clipcil.plugins import LOADED, names_file
from clipcil.settings import build, merge, nested, override, parse_words, to_dict

SYMBOLS = {"M": "prompt_length", "β": "beta", "λ": "ortho", "lambda": "ortho"}
"""The paper's names of three settings of DMC-OT."""


class Case(NamedTuple):
    """A method with settings and options of the run, as one line of a table or one point of a curve."""

    label: str
    method: str
    settings: Mapping[str, Any]
    run: Mapping[str, Any]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a grid."""

    label: str
    spec: RunSpec
    config: Any
    folder: Path
    problem: str = ""
    """Why the run cannot be done, where that is known beforehand."""

    @property
    def line(self) -> tuple[str, str, int | None]:
        """Label, dataset and number of tasks: runs that differ only in class order and seed share a line."""
        return self.label, self.spec.data, self.spec.tasks

    @property
    def table(self) -> dict[str, Any]:
        """Every option and setting, as `config.toml` holds them."""
        return as_table(self.spec, self.config)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process has to execute the files of the run before it knows the class of its settings."""
        if not self.spec.code or self.config is None:
            return PlannedRun, (self.label, self.spec, self.config, self.folder, self.problem)
        files = [str(LOADED[name]) for name in self.spec.code]
        return _in_another_process, (files, self.label, self.spec, to_dict(self.config), self.folder)


def _in_another_process(
    files: Sequence[str], label: str, spec: RunSpec, settings: dict[str, Any], folder: Path
) -> PlannedRun:
    for path in files:
        own_methods(path)
    return PlannedRun(label, spec, method_settings(spec, settings, preset=False), folder)


def plan(grid: Grid) -> list[PlannedRun]:
    """Every run of a bench, dataset by dataset so that features are shared; a wrong name or value is refused."""
    table = read_table(grid.table) if grid.table else None
    own = {word: named_method(word) for word in grid.methods if names_file(word)}
    grid = replace(grid, methods=tuple(own[word].name if word in own else word for word in grid.methods))
    rows = list(table.rows) if table else []
    rows += [Row(kind.title, kind.name) for kind in (own if table else methods()).values()]
    rows, data = _choose(rows, grid.data or (table.datasets if table else ()) or ("emoji",), grid)
    for key in map(_key, grid.set):
        if any(key in row.decides for row in rows):
            raise UserError(f"the rows of {grid.table} decide '{key}' themselves; leave it out, or bench without table")
    run = {"tasks": table.tasks, "backbone": table.backbone, **grid.run} if table else dict(grid.run)
    if "increment" in run and "tasks" not in grid.run:
        run.pop("tasks", None)
    cases = []
    for row in rows:
        is_asked = not row.tasks or {"tasks", "increment"} & set(grid.run)
        for tasks in ({},) if is_asked else tuple({"tasks": number} for number in row.tasks):
            settings = row.settings_with(tasks.get("tasks", run.get("tasks")))
            cases.append(Case(row.label, row.method, settings, tasks))
    orders = grid.orders or (table.orders if table and "order" not in grid.run else ())
    return _expand(cases, data, replace(grid, orders=orders, run=run))


def plan_sweep(method: str, key: str, values: Sequence[str], grid: Grid) -> list[PlannedRun]:
    """A run for each dataset, value and seed; the label of each is its value.

    `key` is a setting of the method or an option of the run. Without values it takes those of the paper's study.
    """
    method = named_method(method).name
    config = find_method(method).Config()
    key = key if has_setting(config, key) else SYMBOLS.get(key, key)
    options = {item.name for item in dataclasses.fields(RunSpec)} - PER_RUN
    if not has_setting(config, key) and key not in options:
        known = [*(item.name for item in dataclasses.fields(config)), *sorted(options)]
        raise UserError(f"{method} has no setting '{key}'{nearest(key, known)}")
    study = (f"{row.settings[key]:g}" for row in read_table("sensitivity").rows if key in row.settings)
    chosen = list(dict.fromkeys(values or study))
    if len(chosen) < 2:
        raise UserError(f"a sweep needs at least two values of '{key}'; write them one after the other")
    if has_setting(config, key):
        cases = [Case(value, method, nested({key: value}), {}) for value in chosen]
        given = [f"--set {word}" for word in grid.set if _key(word) == key]
    else:
        cases = [Case(value, method, {}, {key: value}) for value in chosen]
        same = ("tasks", "increment") if key in ("tasks", "increment") else (key,)
        given = [f"--{name.replace('_', '-')}" for name in same if name in grid.run]
        given += ["--orders"] if key == "order" and grid.orders else []
    if given:
        raise UserError(f"the sweep itself decides '{key}'; leave out {given[0]}")
    planned = _expand(cases, grid.data or ("emoji",), grid)
    if problems := [each.problem for each in planned if each.problem]:
        raise UserError(problems[0])  # an invalid value of a sweep is refused, not reported as a failed run
    return planned


def _choose(rows: list[Row], data: Sequence[str], grid: Grid) -> tuple[list[Row], list[str]]:
    """The rows of the methods that are named, then rows and datasets cut by the patterns of `--only`."""

    def fits(row: Row, pattern: str) -> bool:
        return fnmatchcase(row.method, pattern) or fnmatchcase(row.label.lower(), pattern.lower())

    names = list(dict.fromkeys(row.method for row in rows))
    if grid.methods and "all" not in grid.methods:
        for pattern in grid.methods:
            if not any(fits(row, pattern) for row in rows):
                raise UserError(f"there is no method '{pattern}' here{nearest(pattern, names)}")
        named = [row for pattern in grid.methods for row in rows if fits(row, pattern)]
        rows = list({(row.method, row.label): row for row in named}.values())
    for pattern in grid.only:
        if not any(fits(row, pattern) for row in rows) and not any(fnmatchcase(name, pattern) for name in data):
            near = nearest(pattern, [*names, *data])
            raise UserError(f"--only '{pattern}' fits no method and no dataset of the grid{near}")
    of_rows = [row for row in rows if any(fits(row, pattern) for pattern in grid.only)]
    of_data = [name for name in data if any(fnmatchcase(name, pattern) for pattern in grid.only)]
    return of_rows or rows, of_data or list(data)


def _expand(cases: Sequence[Case], data: Sequence[str], grid: Grid) -> list[PlannedRun]:
    """A run for each dataset, case, class order and seed."""
    data = [named_dataset(name) for name in data]
    for name in data:
        if name not in datasets() and Path(name).is_dir():
            raise UserError(f"'{name}' is a folder; give --data folder --data-root {quoted(name)}")
    sources = {name: find_dataset(name).options() for name in data}
    configs = {case.method: find_method(case.method).Config() for case in cases}
    settings = _share_words(grid.set, configs, "methods has a setting")
    options = _share_words(grid.data_options, sources, "datasets has an option")
    roots = data_roots(grid.data_root, data)
    orders = [{"order": order} for order in grid.orders] or [{}]
    planned = []
    for name, case, order, seed in product(data, cases, orders, range(grid.seeds)):
        where = {"data": name, "data_root": roots[name], "data_options": options[name]}
        run = {**grid.run, **case.run, **order, **where, "method": case.method, "seed": seed}
        given = merge(settings[case.method], case.settings)
        planned.append(_resolve(case.label, build(RunSpec, run), given, grid.out))
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
    return PlannedRun(label, spec, config, out / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}")


def _share_words(words: Sequence[str], owners: Mapping[str, Any], what: str) -> dict[str, dict[str, Any]]:
    """The words key=value that each method or dataset takes; a word that none of them takes is refused.

    `owners` maps the name of each to its defaults, and `what` is for the message.
    """
    for word in words:
        parse_words([word])
        if not any(has_setting(defaults, _key(word)) for defaults in owners.values()):
            every = sorted({item.name for defaults in owners.values() for item in dataclasses.fields(defaults)})
            raise UserError(f"none of the {what} '{_key(word)}'{nearest(_key(word), every)}")
    found = {}
    for name, defaults in owners.items():
        found[name] = parse_words([word for word in words if has_setting(defaults, _key(word))])
        override(defaults, found[name])  # all values at once: which one fits may depend on another
    return found


def _key(word: str) -> str:
    return word.partition("=")[0].strip()


def has_setting(config: Any, key: str) -> bool:
    """Whether the dataclass instance has the (dotted) setting."""
    name, _, rest = key.partition(".")
    known = dataclasses.is_dataclass(config) and name in {field.name for field in dataclasses.fields(config)}
    return known and (not rest or has_setting(getattr(config, name), rest))


def data_roots(words: Sequence[str], data: Iterable[str]) -> dict[str, Path | None]:
    """The folder of each dataset: the one named for it, or its part of the folder named for all.

    Paths are absolute, so that a run has the same folder however its data is named. An embedded dataset has none.
    """
    known = datasets()
    pairs = (word.partition("=") for word in words)
    own: dict[str, Path | None] = {name: Path(folder) for name, equals, folder in pairs if equals}
    for name in own:
        if name not in known:
            raise UserError(f"--data-root {name}=…: there is no dataset '{name}'{nearest(name, known)}")
    general = [Path(word) for word in words if "=" not in word]
    if len(general) > 1:
        raise UserError(f"--data-root names {len(general)} folders; give one, or write dataset=folder for each")
    if general:
        own = {name: own_folder(name, general[0]) for name in data if find_dataset(name).needs != "nothing"} | own
    return {name: root.absolute() if (root := own.get(name)) else None for name in data}

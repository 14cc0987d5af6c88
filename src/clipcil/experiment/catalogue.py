"""Printed lists: methods, their settings, datasets."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any

from rich.console import Console
from rich.table import Table

from clipcil.data.dataset import datasets, find_dataset
from clipcil.experiment.spec import RunSpec, method_settings
from clipcil.methods.registry import find_method, methods


def print_methods() -> None:
    table = Table("name", "method", "keeps", "tunes the tower", "in short", box=None)
    for name, kind in sorted(methods().items()):
        keeps = "exemplars" if kind.keeps_exemplars else "statistics"
        summary = (inspect.getdoc(inspect.getmodule(kind)) or "").split("\n")[0]
        table.add_row(name, kind.title, keeps, "yes" if kind.tunes_tower else "", summary)
    Console().print(table)


def print_settings(name: str, data: str) -> None:
    """Every setting of a method with its value (that of the preset for `data`) and its reason."""
    kind = find_method(name)
    config = method_settings(RunSpec(method=name, data=data or "emoji"), {}, preset=bool(data))
    table = Table("setting", "value", "what it is", box=None)
    for key, value, reason in _settings(config, ""):
        table.add_row(key, value, reason)
    console = Console()
    console.print(f"{kind.title}: settings for --set key=value" + (f", with the preset for {data}" if data else ""))
    console.print(table)


def print_datasets() -> None:
    table = Table("name", "what", "needs", box=None)
    for name, entry in datasets().items():
        table.add_row(name, entry.summary, entry.needs)
    Console().print(table)


def print_data_options(name: str) -> None:
    """Every option of a dataset with its value and reason."""
    entry = find_dataset(name)
    table = Table("option", "value", "what it is", box=None)
    for key, value, reason in _settings(entry.options(), ""):
        table.add_row(key, value, reason)
    console = Console()
    console.print(f"{name}: {entry.summary}; needs {entry.needs}. Options for --data-set key=value:")
    console.print(table)


def _settings(config: Any, prefix: str) -> list[tuple[str, str, str]]:
    reasons = field_docs(type(config))
    rows = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            rows += _settings(value, f"{prefix}{field.name}.")
        else:
            rows.append((prefix + field.name, str(value), reasons.get(field.name, "")))
    return rows


def field_docs(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, base classes included."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = (
                    after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
                )
                if isinstance(text, str) and text:
                    docs[statement.target.id] = " ".join(text.split())
    return docs

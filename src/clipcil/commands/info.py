"""`clipcil methods` and `clipcil datasets`: lists of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any

from cyclopts import Parameter

from clipcil.errors import UserError


def methods(
    method: Annotated[str, Parameter(metavar="METHOD", show_default=False)] = "",
    /,
    *,
    data: Annotated[str, Parameter(metavar="NAME", show_default=False)] = "",
    backbone: Annotated[str, Parameter(metavar="NAME")] = "mini",
) -> None:
    """List the methods, or the settings of one with their values and reasons.

    For example:
      clipcil methods
      clipcil methods dmc-ot
      clipcil methods dmc-ot --data cub200 --backbone openai/clip-vit-base-patch16

    Args:
        method: Show the settings of this method.
        data: Show the values that a run on this dataset uses: those of its preset, where there is one.
        backbone: Show the values for this backbone; some presets have other values for mini.
    """
    import inspect

    from clipcil.data.dataset import find_dataset
    from clipcil.experiment.spec import RunSpec, method_settings, read_preset
    from clipcil.methods.registry import find_method, methods

    if data and not method:
        raise UserError(f"--data shows the preset of one method; name a method: clipcil methods METHOD --data {data}")
    if not method:
        rows = []
        for name, kind in sorted(methods().items()):
            summary = (inspect.getdoc(inspect.getmodule(kind)) or "").split("\n")[0]
            if kind.title not in summary:  # a variant, whose file begins with the name of the method
                summary = f"{kind.title}: {summary.partition(': ')[2] or summary}"
            rows.append((name, kind.keeps, "tuned" if kind.tunes_tower else "frozen", summary))
        _print(("name", "keeps", "tower", "in short"), rows)
        print("keeps: what remains of old classes; tower: the vision tower. clipcil methods NAME shows the settings.")
        return
    if data:
        find_dataset(data)
    kind, spec = find_method(method), RunSpec(method=method, data=data or "emoji", backbone=backbone)
    config = method_settings(spec, {}, preset=bool(data))
    kept = data and read_preset(data, kind.presets or method, spec.backbone)
    about = f", with the preset for {data}" if kept else f"; there is no preset for {data}" if data else ""
    print(f"{kind.title}: settings for --set key=value{about}")
    _print(("setting", "value", "what it is"), _settings(config))
    if not data:
        print("A run may take other values from its dataset's preset: --data NAME shows them.")


def datasets(data: Annotated[str, Parameter(metavar="DATASET", show_default=False)] = "", /) -> None:
    """List the datasets and the files that each needs, or the options of one.

    For example:
      clipcil datasets
      clipcil datasets cub200

    Args:
        data: Show the options of this dataset, for --data-options key=value.
    """
    from clipcil.data.dataset import datasets, find_dataset

    if data:
        entry = find_dataset(data)
        print(f"{data}: {entry.summary}; needs {entry.needs}. Options for --data-options key=value:")
        _print(("option", "value", "what it is"), _settings(entry.options()))
    else:
        _print(("name", "what", "needs"), ((name, entry.summary, entry.needs) for name, entry in datasets().items()))


def _print(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*header, box=None)
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)  # [video] in a text is no markup


def _settings(config: Any, prefix: str = "", reason: str = "") -> list[tuple[str, str, str]]:
    """Every setting with its value and reason; the reason of a group stands above its settings."""
    from clipcil.settings import field_docs

    reasons, rows = field_docs(type(config)), []
    if reason:
        rows.append((f"{prefix}…", "", reason))
    for field in dataclasses.fields(config):
        value, why = getattr(config, field.name), reasons.get(field.name, "")
        if dataclasses.is_dataclass(value):
            rows += _settings(value, f"{prefix}{field.name}.", why)
        else:
            rows.append((prefix + field.name, str(value), why))
    return rows

"""Types of command-line arguments with their help, and options made from a dataclass."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from clipcil.experiment.spec import PER_RUN, Grid, RunSpec
from clipcil.settings import field_docs

Number = Annotated[int, tyro.conf.arg(metavar="N")]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
Download = Annotated[Flag, tyro.conf.arg(help="Download a backbone that the folder names and that is not here.")]
Device = Annotated[str, tyro.conf.arg(metavar="NAME", help="cpu, cuda or auto.")]
Name = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
Backbone = Annotated[Name, tyro.conf.arg(help="Path of the model's backbone on this machine, if it has moved.")]
NewBackbone = Annotated[
    Name, tyro.conf.arg(help="Backbone of a new model (default: mini), or the path of an existing model's backbone.")
]
On = Annotated[Literal["here", "ray"], tyro.conf.arg(help_behavior_hint="(default: here)")]
Address = Annotated[str | None, tyro.conf.arg(metavar="ADDRESS", help_behavior_hint="")]
Words = Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE…", help_behavior_hint="")]

METAVARS = {"data_options": "KEY=VALUE…", "set": "KEY=VALUE…", "only": "PATTERN…"}
METAVARS |= {"data_root": "DIR", "out": "DIR", "kept": "DIR…"}
"""Placeholders of values in help, where they do not follow from the type."""


def options_of(kind: type, without: Collection[str] = (), positional: str = "") -> Any:
    """A dataclass with the fields of `kind`, each None where it was not given on the command line.

    The words are kept as they are: `settings.build` converts them, so that the command line and a file are checked by
    the same rules. Help texts come from the docstrings under the fields.
    """
    hints, docs, fields = typing.get_type_hints(kind), field_docs(kind), []
    for item in dataclasses.fields(kind):
        name, hint = item.name, str(hints[item.name])
        if name in without:
            continue
        several, flag = "tuple" in hint or "dict" in hint, hints[name] is bool
        metavar = METAVARS.get(name, "NAME…" if several else "N" if "int" in hint or "float" in hint else "NAME")
        metavar = f"[{name.upper()}]" if name == positional else metavar
        usual = "" if flag or item.default in (None, dataclasses.MISSING, ()) else f"(default: {item.default})"
        shown: Any = bool if flag else tuple[str, ...] | None if several else str | None
        marks = [tyro.conf.FlagCreatePairsOff] if flag else [tyro.conf.Positional] if name == positional else []
        help_text = tyro.conf.arg(help=docs[name], metavar=None if flag else metavar, help_behavior_hint=usual)
        for mark in (help_text, *marks):
            shown = Annotated[shown, mark]
        fields.append((name, shown, False if flag else None))
    return tyro.conf.arg(constructor=dataclasses.make_dataclass(kind.__name__, fields), name="")


def given(options: Any) -> dict[str, Any]:
    """What was given on the command line."""
    return {name: value for name, value in vars(options).items() if value not in (None, False, ())}


RunOptions = Annotated[Any, options_of(RunSpec, positional="method")]
GridRunOptions = Annotated[Any, options_of(RunSpec, without=PER_RUN)]
BenchOptions = Annotated[Any, options_of(Grid, without=("run",), positional="table")]
SweepOptions = Annotated[Any, options_of(Grid, without=("run", "table", "methods", "only"))]

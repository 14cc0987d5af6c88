"""Types of command-line arguments with their help, and options made from a dataclass."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import Parameter, validators

Command = TypeVar("Command", bound=Callable[..., None])

Model = Annotated[Path, Parameter(metavar="MODEL")]
Pictures = Annotated[Path, Parameter(metavar="FOLDER")]
Number = Annotated[int, Parameter(metavar="N")]
Count = Annotated[Number, Parameter(validator=validators.Number(gte=1, lte=1_000_000))]
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
Folder = Annotated[Path | None, Parameter(metavar="DIR")]
File = Annotated[Path | None, Parameter(metavar="FILE")]
Download = Annotated[Flag, Parameter(help="Allow downloading the backbone that the model or the run names.")]
Device = Annotated[str, Parameter(metavar="NAME", help="cpu, cuda or auto.")]
Name = Annotated[str | None, Parameter(metavar="NAME")]
Backbone = Annotated[Name, Parameter(help="Path of the model's backbone on this machine, if it has moved.")]
NewBackbone = Annotated[
    Name, Parameter(help="Backbone of a new model (default: mini), or the path of an existing model's backbone.")
]
On = Literal["here", "ray"]
Address = Annotated[str | None, Parameter(metavar="ADDRESS")]
Words = Annotated[tuple[str, ...], Parameter(metavar="KEY=VALUE", show_default=False)]

METAVARS = {"data_options": "KEY=VALUE", "set": "KEY=VALUE", "only": "PATTERN"}
METAVARS |= {"data_root": "DIR", "out": "DIR", "kept": "DIR"}
"""Placeholders of values in help, where they do not follow from the type."""


_TAKEN: dict[Callable[..., None], tuple[tuple[str, ...], Collection[str]]] = {}


def takes(*kinds: str, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Decorator: the `**options` of a command are the fields of dataclasses of `experiment/spec.py`, as words.

    Args:
        kinds: Names of the dataclasses. The first of two fields with the same name counts.
        without: Fields that the command does not take as options.
    """

    def keep(command: Command) -> Command:
        _TAKEN[command] = kinds, without
        return command

    return keep


def declare_options(command: Callable[..., None]) -> None:
    """Put the options that `takes` names into the signature of the command. The list of commands needs none.

    `settings.build` converts the words, so that the command line and a file are checked by the same rules. A command
    gets only the options that were given. Help texts come from the docstrings under the fields.
    """
    if command not in _TAKEN:
        return
    from clipcil.experiment import spec
    from clipcil.settings import field_docs

    kinds, without = _TAKEN[command]
    signature = inspect.signature(command, eval_str=True)
    known = {name: each for name, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD}
    for kind in (getattr(spec, name) for name in kinds):
        hints, docs = typing.get_type_hints(kind), field_docs(kind)
        for field in dataclasses.fields(kind):
            if field.name not in without and field.name not in known:
                shown = _option(field, hints[field.name], docs[field.name])
                absent = False if hints[field.name] is bool else None
                keyword = inspect.Parameter.KEYWORD_ONLY
                known[field.name] = inspect.Parameter(field.name, keyword, default=absent, annotation=shown)
    command.__signature__ = signature.replace(parameters=list(known.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: each.annotation for name, each in known.items()}


def _option(field: dataclasses.Field[Any], hint: Any, text: str) -> Any:
    if hint is bool:
        return Annotated[Flag, Parameter(help=text)]
    several, number = typing.get_origin(hint) in (tuple, dict), "int" in str(hint) or "float" in str(hint)
    metavar = METAVARS.get(field.name, "N" if number else "NAME")
    usual = field.default not in (None, dataclasses.MISSING, ()) and f"{field.default}"
    described = Parameter(help=f"{text} (default: {usual})" if usual else text, metavar=metavar)
    return Annotated[tuple[str, ...] | None if several else str | None, described]

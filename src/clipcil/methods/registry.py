"""The registry of methods: the files of this folder, and plugins from other installed packages."""

import importlib
import pkgutil
from functools import cache
from pathlib import Path

from clipcil.errors import UserError, nearest
from clipcil.methods.base import Method
from clipcil.plugins import plugins, warn

REGISTRY: dict[str, type[Method]] = {}


def register(kind: type[Method]) -> type[Method]:
    """Class decorator: register a method by its `name`. A class that is defined again replaces the first.

    Raises:
        ValueError: Another method has that name.
    """
    other = REGISTRY.get(kind.name, kind)
    homes = [f"{each.__module__}.{each.__qualname__}" for each in (other, kind)]
    if homes[0] != homes[1]:
        raise ValueError(f"two methods are called '{kind.name}': {homes[0]} and {homes[1]}")
    REGISTRY[kind.name] = kind
    return kind


def methods() -> dict[str, type[Method]]:
    """All methods by name: those of clipcil, and those of other packages by their entry point `clipcil.methods`.

    Returns:
        Classes by name; `clipcil.Experiment` takes either.

    Examples:
        >>> import clipcil
        >>> clipcil.methods()["dmc-ot"].title
        'DMC-OT'
        >>> clipcil.methods()["simplecil"].keeps
        'class means'
    """
    _import_all()
    return dict(REGISTRY)


@cache
def _import_all() -> None:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"clipcil.methods.{module.name}")
    for point, kind in plugins("clipcil.methods"):
        try:
            if isinstance(kind, type):
                register(method_class(kind))
        except (ValueError, UserError) as error:  # a name that is taken, or a class that is not a method
            warn(point, error)


def find_method(name: str) -> type[Method]:
    """The method called `name`."""
    if not isinstance(name, str):
        raise UserError(f"method is {name!r}; give the name of a method")
    known = methods()
    if name not in known:
        raise UserError(f"there is no method '{name}'{nearest(name, known)}")
    return known[name]


def method_class(kind: object) -> type[Method]:
    """A class that a caller gave as a method.

    Raises:
        UserError: It is not a method, or it has no name or title.
    """
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise UserError(f"method is {kind!r}; give the name of a method, or a class derived from clipcil.Method")
    for attribute in ("name", "title"):
        if not hasattr(kind, attribute):
            raise UserError(f"class {kind.__name__} has no '{attribute}'; a method needs a name and a title")
    return kind

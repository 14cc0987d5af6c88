"""The registry of methods: the files of this folder, plugins from other packages, and files that the user names."""

import importlib
import inspect
import pkgutil
from functools import cache
from pathlib import Path

from clipcil.errors import UserError, nearest
from clipcil.methods.base import Method
from clipcil.plugins import home, load_file, names_file, pick, plugins, warn

REGISTRY: dict[str, type[Method]] = {}


def register(kind: type[Method]) -> type[Method]:
    """Class decorator: register a method by its `name`. A class that is defined again, in the same place, replaces the
    first.

    Raises:
        ValueError: Another method has that name.
    """
    homes = home(REGISTRY.get(kind.name, kind)), home(kind)
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


def named_method(word: str) -> type[Method]:
    """The method that a user names: by its name, or by a file, which is executed: `mine.py`, or `mine.py:Means` where
    the file has several."""
    return pick(word, own_methods(word), "method") if isinstance(word, str) and names_file(word) else find_method(word)


def own_methods(path: str) -> dict[str, type[Method]]:
    """Execute a file, register its methods, and return them by the names of their classes."""
    module = load_file(path)
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Method)]
    own = {kind.__name__: kind for kind in kinds if kind.__module__ == module.__name__ and not inspect.isabstract(kind)}
    _import_all()  # so that no name of clipcil is taken
    for kind in own.values():
        try:
            register(method_class(kind))
        except ValueError as error:
            raise UserError(f"{error}; rename the one in {path}") from error
    return own


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

"""Methods and datasets of others: of installed packages, by their entry points, and of files that the user names.

A file is executed only where the user names it (`mine.py`, `mine.py:Means` or `mine:Means`): the name in the folder of
a run or of a model is not enough.
"""

import hashlib
import sys
import traceback
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from clipcil.errors import UserError, first_line, nearest
from clipcil.storage import read_bytes

T = TypeVar("T")

LOADED: dict[str, Path] = {}
"""The files that were executed, by the names of their modules."""


@cache
def plugins(group: str) -> list[tuple[EntryPoint, Any]]:
    """What installed packages offer under the entry points `group`, imported; a broken one is left out.

    Args:
        group: `clipcil.methods` (a class derived from `clipcil.Method`, or a module that registers one) or
            `clipcil.datasets` (a module or function that registers a dataset).
    """
    found = []
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        try:
            found.append((point, point.load()))
        except (Exception, SystemExit) as error:  # a package that cannot be imported must not stop the others
            warn(point, error)
    return found


def warn(point: EntryPoint, error: BaseException) -> None:
    """Say in one line that a plugin is not used."""
    package = point.dist.name if point.dist else "a package"
    line = f"{point.group} '{point.name}' of {package} is not used: {type(error).__name__}: {first_line(error)}"
    print(f"clipcil: warning: {line}", file=sys.stderr)


def need_extra(module: str, extra: str = "") -> Any:
    """A module that an extra of clipcil installs; where it is missing, the error names the extra."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"this needs {extra or module}; install it with: pip install 'clipcil[{extra or module}]'"
        ) from error


def names_file(word: str) -> bool:
    """Whether a word names a file of code: `mine.py`, `mine.py:Means` or `mine:Means`."""
    path, colon, _ = word.partition(":")
    return (path.endswith(".py") or bool(colon)) and not Path(word).is_dir()


def load_file(word: str) -> ModuleType:
    """Execute the file that a word names, once for each of its contents.

    The module is named after the file and the digest of its contents, so that the results of an edited file are never
    taken for those of the file before.
    """
    path = Path(word.partition(":")[0])
    path = path if path.suffix == ".py" else path.with_name(f"{path.name}.py")
    code = read_bytes(path, links=True)
    name = f"{path.stem}_{hashlib.sha256(code).hexdigest()[:12]}"
    if name not in LOADED:
        module = sys.modules[name] = ModuleType(name)
        module.__file__, LOADED[name] = str(path), path.resolve()
        if (folder := str(path.resolve().parent)) not in sys.path:
            sys.path.append(folder)  # for files beside it
        try:
            exec(compile(code, str(path), "exec"), vars(module))
        except (Exception, SystemExit) as error:
            del LOADED[name], sys.modules[name]
            frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == str(path)]
            line = getattr(error, "lineno", None) or (frames[-1].lineno if frames else 1)
            raise UserError(f"{path}, line {line}: {type(error).__name__}: {first_line(error)}") from error
    return sys.modules[name]


def pick(word: str, own: Mapping[str, T], what: str) -> T:
    """The one that a word such as `mine.py:Means` names among the methods or datasets of its file."""
    path, _, name = word.partition(":")
    if not own:
        raise UserError(f"{path} defines no {what}")
    if name and name not in own:
        raise UserError(f"{path} defines no {what} '{name}'{nearest(name, own)}")
    if not name and len(own) > 1:
        words = ", ".join(f"{path}:{key}" for key in own)
        raise UserError(f"{path} defines {len(own)} {what}s; name one of them: {words}")
    return own[name or next(iter(own))]


def home(thing: Any) -> str:
    """Where a class or function is defined; the same for all contents of one file."""
    path = LOADED.get(thing.__module__)
    return f"{path}:{thing.__qualname__}" if path else f"{thing.__module__}.{thing.__qualname__}"

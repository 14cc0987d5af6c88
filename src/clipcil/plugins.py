"""Methods and datasets of other installed packages, found by their entry points."""

import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from clipcil.errors import first_line


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

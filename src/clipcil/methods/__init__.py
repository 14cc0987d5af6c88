"""One file per method. `clipcil.methods()` lists them all: this package is also the public function of that name."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Methods(ModuleType):
    """The package made callable: importing a method sets `clipcil.methods` to this package, hiding the function."""

    def __call__(self) -> dict[str, Any]:
        from clipcil.methods.registry import methods

        return dict(methods())


sys.modules[__name__].__class__ = _Methods

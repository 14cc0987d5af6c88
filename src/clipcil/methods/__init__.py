"""One file per method. The package can be called: `clipcil.methods()` lists the methods, as `registry.methods` does."""

import sys
from types import ModuleType
from typing import Any


class _Methods(ModuleType):
    """Importing a module of this package sets `clipcil.methods` to the package, so the package must be the function."""

    def __call__(self) -> dict[str, Any]:
        from clipcil.methods.registry import methods

        return dict(methods())


sys.modules[__name__].__class__ = _Methods

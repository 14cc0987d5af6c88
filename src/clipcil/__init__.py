"""clipcil: class-incremental learning with CLIP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Classifier", "Prediction", "__version__", "load"]

if TYPE_CHECKING:
    from clipcil.classifier.classifier import Classifier, load
    from clipcil.classifier.predicting import Prediction

_WHERE = {
    "Classifier": "clipcil.classifier.classifier",
    "load": "clipcil.classifier.classifier",
    "Prediction": "clipcil.classifier.predicting",
}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: `import clipcil` alone takes no torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'clipcil' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

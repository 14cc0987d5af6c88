"""clipcil: class-incremental learning with CLIP.

`Experiment` runs a method on a dataset task by task; `Classifier` learns folders of your own pictures and tells them
apart. Nothing heavy is imported before one of these names is used.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.2.0"

TYPE_CHECKING = False  # typing is slow to import, and `__main__` handles Ctrl-C only after this file
if TYPE_CHECKING:
    from typing import Any

    from clipcil import checks as checks
    from clipcil.classifier.classifier import Classifier as Classifier
    from clipcil.classifier.load import load as load
    from clipcil.classifier.predict import Prediction as Prediction
    from clipcil.clip import load_clip as load_clip
    from clipcil.data.dataset import Dataset as Dataset
    from clipcil.data.dataset import datasets as datasets
    from clipcil.errors import UserError as UserError
    from clipcil.experiment.experiment import Experiment as Experiment
    from clipcil.experiment.results import Results as Results
    from clipcil.methods.base import Method as Method
    from clipcil.methods.registry import methods as methods
    from clipcil.report.runs import read_runs as read_runs
    from clipcil.training.trainer import Callback as Callback
    from clipcil.training.trainer import Training as Training

_HOME = {
    "Callback": "training.trainer",
    "Classifier": "classifier.classifier",
    "Dataset": "data.dataset",
    "Experiment": "experiment.experiment",
    "Method": "methods.base",
    "Prediction": "classifier.predict",
    "Results": "experiment.results",
    "Training": "training.trainer",
    "UserError": "errors",
    "datasets": "data.dataset",
    "load": "classifier.load",
    "load_clip": "clip.loading",
    "read_runs": "report.runs",
}
__all__ = sorted([*_HOME, "__version__", "checks", "methods"])


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: `import clipcil` alone does not import torch."""
    if name in ("checks", "methods"):
        return import_module(f"clipcil.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'clipcil' has no attribute '{name}'")
    return getattr(import_module(f"clipcil.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

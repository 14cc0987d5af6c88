"""Write docs/api.md: the public names of clipcil with their docstrings. Run: python tools/make_api_docs.py"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clipcil
from clipcil.experiment.spec import RunSpec
from clipcil.settings import field_docs

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
ORDER = (
    "Experiment", "Results", "methods", "datasets", "Method", "Dataset", "Training", "load_clip", "Classifier", "load",
    "Prediction", "UserError",
)  # fmt: skip
USED = {  # what the names above hand to a caller or to the author of a method
    "Lesson": "classifier.lesson", "LessonStoppedError": "classifier.lesson", "Evaluation": "classifier.scoring",
    "Task": "data.tasks", "Pictures": "data.reader", "Batch": "data.reader", "Trainer": "training.trainer",
    "TowerTraining": "training.augment", "tuned": "training.tuning",
}  # fmt: skip
HEAD = """# The Python API

Made from the docstrings by `python tools/make_api_docs.py`; a test holds it current. Every example runs as a test.
"""


def page() -> str:
    """The whole page."""
    missing = set(clipcil.__all__) - {*ORDER, "__version__", "checks"}
    if missing:
        raise SystemExit(f"give {', '.join(sorted(missing))} a place in ORDER")
    parts = [HEAD, *(section(name) for name in ORDER)]
    parts.append(function("clipcil.checks.check_method", clipcil.checks.check_method))
    for name, room in USED.items():
        parts.append(describe(f"clipcil.{room}.{name}", getattr(importlib.import_module(f"clipcil.{room}"), name)))
    return "\n".join(parts)


def section(name: str) -> str:
    """A public name: a class with its members, or a function."""
    return describe(
        f"clipcil.{name}", clipcil.methods.registry.methods if name == "methods" else getattr(clipcil, name)
    )


def describe(name: str, thing: Any) -> str:
    """A class with its members, or a function."""
    if not inspect.isclass(thing):
        return function(name, thing)
    lines = [function(name, thing)]
    if thing is clipcil.Experiment:
        lines += ["Options:\n", *(f"- `{key}`: {text}" for key, text in field_docs(RunSpec).items()), ""]
    if dataclasses.is_dataclass(thing):
        docs, names = field_docs(thing), [item.name for item in dataclasses.fields(thing)]
        lines += ["Fields:\n", *(f"- `{key}`: {docs.get(key, '')}".rstrip(": ") for key in names), ""]
    kinds = [kind for kind in reversed(thing.__mro__) if kind.__module__.startswith("clipcil.classifier")] or [thing]
    for key, member in {key: member for kind in kinds for key, member in vars(kind).items()}.items():
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if key.startswith("_") or not (isinstance(member, property) or inspect.isfunction(plain)):
            continue
        if not inspect.getdoc(plain):
            raise SystemExit(f"{name}.{key} has no docstring")
        if isinstance(member, property):
            lines.append(f"- `{key}`: {' '.join(text_of(member).split())}")
        else:
            lines += [f"- `{key}{signature(plain)}`: {summary(plain)}", *arguments(plain)]
    return "\n".join(lines) + "\n"


def function(name: str, thing: Callable[..., Any]) -> str:
    """Signature and docstring; sections such as `Args:` become headings, examples code."""
    return f"## `{name}{signature(thing)}`\n\n{text_of(thing)}\n"


def text_of(thing: Any) -> str:
    out: list[str] = []
    for line in (inspect.getdoc(thing) or "").splitlines():
        if line in ("Args:", "Returns:", "Raises:"):
            out.append(f"**{line}**\n")
        elif line == "Example:":
            out.append("```python")
        elif out and "```python" in out:
            out.append(line.removeprefix("    "))
        elif line.startswith("    ") and not line.startswith("     ") and ": " in line:
            key, _, rest = line.strip().partition(": ")
            out.append(f"- `{key}`: {rest}")
        elif line.startswith("    "):
            out.append(f"  {line.strip()}")
        else:
            out.append(line)
    return "\n".join([*out, "```"] if "```python" in out else out)


def summary(thing: Any) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def arguments(thing: Any) -> list[str]:
    """The `Args:` of a docstring, each a line of a list in a list."""
    _, _, rest = (inspect.getdoc(thing) or "").partition("\nArgs:\n")
    lines: list[str] = []
    for line in rest.split("\n\n")[0].splitlines():
        if line.startswith("     "):
            lines[-1] += f" {line.strip()}"
        else:
            key, _, text = line.strip().partition(": ")
            lines.append(f"  - `{key}`: {text}")
    return lines


def signature(thing: Any) -> str:
    """The parameters, without `self`."""
    if inspect.isclass(thing) and (issubclass(thing, Exception) or getattr(thing, "_is_protocol", False)):
        return ""
    found = inspect.signature(thing)
    kept = [
        each.replace(annotation=each.annotation if each.annotation is each.empty else Bare(each.annotation))
        for key, each in found.parameters.items()
        if key not in ("self", "cls")
    ]
    return str(found.replace(parameters=kept, return_annotation=inspect.Signature.empty))


class Bare(str):
    """An annotation that is shown without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

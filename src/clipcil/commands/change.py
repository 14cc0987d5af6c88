"""`clipcil forget`, `clipcil rename` and `clipcil undo`: changes to a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from clipcil.commands.learn import Model
from clipcil.commands.types import Backbone, Download
from clipcil.errors import printable, quoted

if TYPE_CHECKING:
    from clipcil.classifier.classifier import Classifier

ClassName = Annotated[str, Parameter(metavar="CLASS")]


def forget(model: Model, name: ClassName, /, *, backbone: Backbone = None, allow_download: Download = False) -> None:
    """Remove a class from a model, with everything that is kept of it.

    Nothing of it is left in the folder, so this cannot be undone.

    For example:
      clipcil forget birds/ "house sparrow"

    Args:
        model: Folder of the model.
        name: The class.
    """
    # The previous model would still contain the class.
    _change(model, backbone, allow_download, lambda classifier: classifier.forget(name), keep_previous=False)
    print(printable(f"{quoted(model)} has forgotten '{name}'"))


def rename(
    model: Model,
    old: ClassName,
    new: Annotated[str, Parameter(metavar="NEW")],
    /,
    *,
    backbone: Backbone = None,
    allow_download: Download = False,
) -> None:
    """Rename a class of a model. Its scores do not change.

    For example:
      clipcil rename birds/ sparrow "house sparrow"

    Args:
        model: Folder of the model.
        old: The class.
        new: The new name.
    """
    _change(model, backbone, allow_download, lambda classifier: classifier.rename(old, new))
    print(printable(f"'{old}' of {quoted(model)} is called '{new}' now"))


def undo(model: Model, /) -> None:
    """Undo the last lesson or new name of a model; undoing again restores it.

    The model before the last `clipcil learn` or `clipcil rename` is kept until the next change.

    For example:
      clipcil undo birds/

    Args:
        model: Folder of the model.
    """
    from clipcil.classifier.model_folder import hold_model, read_model, restore_previous
    from clipcil.classifier.small_pictures import SmallPictures
    from clipcil.classifier.wording import counted, say

    read_model(model)
    with hold_model(model):
        before = read_model(model).known
        facts = restore_previous(model)
        SmallPictures(model).follow(before)
    lessons, classes = counted(facts.lessons, "lesson"), counted(len(facts.known), "class", "classes")
    say(f"{quoted(model)} is again as it was after {lessons}: it knows {classes}")


def _change(
    folder: Path,
    backbone: str | None,
    allow_download: bool,
    do: Callable[[Classifier], None],
    keep_previous: bool = True,
) -> None:
    """Load the model, `do` something to it, write it back; keep the model before it for `clipcil undo`."""
    from clipcil.classifier.classifier import load
    from clipcil.classifier.model_folder import hold_model, read_model
    from clipcil.classifier.small_pictures import SmallPictures

    read_model(folder)  # says what is wrong before a lock is made in a folder that holds no model
    with hold_model(folder):
        model = load(folder, backbone=backbone, allow_download=allow_download)
        before = model.class_facts
        do(model)
        model.write(folder, keep_previous=keep_previous)
        SmallPictures(folder).follow(before)

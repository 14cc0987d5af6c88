"""`clipcil forget` and `clipcil rename`: changes to the classes of a model."""

from __future__ import annotations

from typing import Annotated

import tyro

from clipcil.commands.learn import Choice, Model

ClassName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CLASS")]


def forget(model: Model, name: ClassName, backbone: Choice = None, allow_download: bool = False) -> None:
    """Take a class out of a model, with all that is kept of it.

    Example: clipcil forget birds/ "house sparrow".

    Args:
        model: Folder of the model.
        name: The class.
        backbone: Where the model's backbone lies on this machine, if elsewhere.
        allow_download: Fetch a backbone that the folder names and this machine lacks.
    """
    from clipcil.classifier.change import change
    from clipcil.errors import printable
    from clipcil.network import allow_downloads

    with allow_downloads(allow_download):
        change(model, backbone, lambda classifier: classifier.forget(name))
    print(printable(f"{model} has forgotten '{name}'"))


def rename(
    model: Model,
    old: ClassName,
    new: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NEW")],
    backbone: Choice = None,
    allow_download: bool = False,
) -> None:
    """Call a class of a model something else. Its scores stay as they are.

    Example: clipcil rename birds/ sparrow "house sparrow".

    Args:
        model: Folder of the model.
        old: The class.
        new: What to call it.
        backbone: Where the model's backbone lies on this machine, if elsewhere.
        allow_download: Fetch a backbone that the folder names and this machine lacks.
    """
    from clipcil.classifier.change import change
    from clipcil.errors import printable
    from clipcil.network import allow_downloads

    with allow_downloads(allow_download):
        change(model, backbone, lambda classifier: classifier.rename(old, new))
    print(printable(f"'{old}' of {model} is called '{new}' now"))

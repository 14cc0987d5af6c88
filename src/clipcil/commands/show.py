"""`clipcil show`: what a model knows."""

from __future__ import annotations

from clipcil.commands.learn import Model
from clipcil.commands.types import Flag


def show(model: Model, /, *, json: Flag = False) -> None:
    """Show what a model knows: its classes, when and from how many pictures each was learnt, and its accuracy.

    For example:
      clipcil show birds/

    Args:
        model: Folder of the model.
        json: Print it as JSON.
    """
    from clipcil.classifier.output import json_text
    from clipcil.classifier.summary import print_summary, summarise

    if json:
        print(json_text(summarise(model), indent=1))
    else:
        print_summary(model)

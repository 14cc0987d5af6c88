"""`clipcil learn`: teach a model folders of pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from clipcil.commands.types import Name, Words

Model = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
Choice = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
Seed = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]


def learn(
    model: Model,
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
    method: Choice = None,
    backbone: Choice = None,
    seed: Seed = None,
    set: Words = (),
    hold_out: bool = True,
    skip_broken: bool = False,
    device: Name = "cpu",
    quiet: bool = False,
    allow_download: bool = False,
) -> None:
    """Teach a model the classes in a folder; the pictures of earlier lessons are not needed.

    FOLDER holds a folder of pictures for each class. Classes the model does not know are learnt; of those it knows, the
    new pictures are added. A tenth of the pictures is held out of training, to say how well new pictures are told and
    to set the threshold for "none of these". Nothing of a lesson is kept if it is stopped.
    Examples: clipcil learn birds/ week1/; clipcil learn birds/ week2/; clipcil learn fast/ week1/ --method simplecil.

    Args:
        model: Folder of the model; made if it is not there.
        folder: Folder of class folders.
        method: Method of a new model; `clipcil methods` lists them. Default: discriminant.
        backbone: Backbone of a new model (default: mini), or where the model's own lies on this machine.
        seed: Seed of a new model. Default: 0.
        set: Settings of the method, for a new model.
        hold_out: Hold a tenth of the pictures out of training.
        skip_broken: Leave out pictures that cannot be decoded, and list them, instead of stopping.
        device: cpu, cuda, mps or auto.
        quiet: Print the closing lines only.
        allow_download: Fetch a backbone that the folder names and this machine lacks.
    """
    from clipcil.classifier.teach import teach
    from clipcil.experiment.display import open_display
    from clipcil.network import allow_downloads
    from clipcil.settings import parse_words

    choices = {"method": method, "seed": seed}
    display = open_display(quiet)
    with allow_downloads(allow_download):
        teach(model, folder, choices, parse_words(set), hold_out, skip_broken, backbone, device, display)

"""`clipcil learn`: teach a model folders of pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from clipcil.commands.types import Device, Download, Flag, Name, NewBackbone, Words

Model = Annotated[Path, Parameter(metavar="MODEL")]
Pictures = Annotated[Path, Parameter(metavar="FOLDER")]
Seed = Annotated[int | None, Parameter(metavar="N")]


def learn(
    model: Model,
    folder: Pictures,
    /,
    *,
    method: Name = None,
    backbone: NewBackbone = None,
    seed: Seed = None,
    set: Words = (),
    hold_out: bool = True,
    skip_broken: Flag = False,
    subfolders: Flag = False,
    dry_run: Flag = False,
    device: Device = "cpu",
    quiet: Flag = False,
    allow_download: Download = False,
) -> None:
    """Teach a model the classes in a folder; the pictures of earlier lessons are not needed.

    FOLDER holds a folder of pictures for each class. New classes are learnt; classes that the model knows get
    the new pictures added. Pictures taught before are recognised and skipped. The features of some pictures are kept
    for evaluation: to measure the accuracy over all classes after every lesson, and to recognise pictures that show
    none of them. A lesson that is stopped leaves the model as it was.

    For example:
      clipcil learn birds/ week1/
      clipcil learn birds/ week2/ --dry-run
      clipcil learn tuned/ week1/ --method dmc-ot

    Args:
        model: Folder of the model; created if it does not exist.
        folder: Folder of class folders.
        method: Method of a new model; `clipcil methods` lists them. Default: strata.
        seed: Seed of a new model. Default: 0.
        set: Settings of the method, for a new model.
        hold_out: Keep the features of some pictures for evaluation, besides what the method itself keeps.
        skip_broken: Leave out pictures that cannot be decoded, and list them, instead of stopping.
        subfolders: Accept class folders that hold only folders of pictures.
        dry_run: Show what would be learnt, and learn nothing.
        quiet: Print only the closing lines.
    """
    from clipcil.classifier import teach
    from clipcil.network import allow_downloads
    from clipcil.settings import parse_words

    choices = {"method": method, "seed": seed}
    request = teach.Request(
        model, folder, choices, parse_words(set), backbone, device, hold_out, skip_broken, subfolders, quiet
    )  # fmt: skip
    with allow_downloads(allow_download):
        (teach.dry_run if dry_run else teach.teach)(request)

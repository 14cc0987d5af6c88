"""`clipcil predict`: what pictures show."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from clipcil.commands.learn import Choice, Model
from clipcil.commands.types import Folder, Name


def predict(
    model: Model,
    pictures: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PICTURE…")],
    top: int = 5,
    json: bool = False,
    csv: bool = False,
    folder_out: Folder = None,
    by: Literal["link", "copy"] = "link",
    backbone: Choice = None,
    device: Name = "cpu",
    allow_download: bool = False,
) -> None:
    """Tell what pictures show, with probabilities.

    PICTURE is a file or a folder, any number of them. A picture like none of the classes is said to be so. A picture
    that cannot be read gets a line that says why; the others go on, and the exit code is 1 at the end.
    Examples: clipcil predict birds/ a.jpg b.jpg; clipcil predict birds/ camera/ --csv > found.csv; clipcil predict
    birds/ camera/ --folder-out sorted/.

    Args:
        model: Folder of the model.
        pictures: Pictures, or folders of them.
        top: How many classes to name for each picture.
        json: One JSON object per line.
        csv: A table with a header.
        folder_out: Also sort the pictures into a folder for each class here; they are never moved.
        by: Sort by symbolic link or by copy.
        backbone: Where the model's backbone lies on this machine, if elsewhere.
        device: cpu, cuda, mps or auto.
        allow_download: Fetch a backbone that the folder names and this machine lacks.
    """
    from rich.console import Console
    from rich.progress import track

    from clipcil.classifier.classifier import load
    from clipcil.classifier.output import open_printer
    from clipcil.classifier.sorting import Sorter
    from clipcil.classifier.sources import expand
    from clipcil.errors import UserError
    from clipcil.network import allow_downloads

    if json and csv:
        raise UserError("give --json or --csv, not both")
    if not pictures:
        raise UserError("name a picture or a folder of pictures")
    files = expand(pictures)
    sorter = Sorter(folder_out, by) if folder_out is not None else None
    with allow_downloads(allow_download):
        classifier = load(model, backbone=backbone, device=device)
    printer = open_printer(json, csv, min(top, len(classifier.classes)))
    broken = 0
    console = Console(stderr=True)
    quiet = not console.is_terminal or len(files) < 50
    found = classifier.predict_stream(files, top)
    for picture, prediction in track(found, "pictures", len(files), console=console, disable=quiet, transient=True):
        printer.line(picture, prediction)
        broken += prediction.error is not None
        if sorter is not None:
            sorter.put(picture, prediction)
    if broken:
        print(f"clipcil: {broken} of {len(files)} pictures cannot be read", file=sys.stderr)
        sys.exit(1)

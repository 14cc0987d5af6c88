"""`clipcil predict`: classify pictures."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from clipcil.commands.learn import Model
from clipcil.commands.types import Address, Backbone, Count, Device, Download, Flag, Folder, On

if TYPE_CHECKING:
    from clipcil.classifier.predicting import Prediction

Pictures = Annotated[tuple[Path, ...], Parameter(metavar="PICTURE…")]
MANY = 50
"""Minimum number of pictures for a progress bar."""


def predict(
    model: Model,
    pictures: Pictures,
    /,
    *,
    top: Count = 5,
    json: Flag = False,
    csv: Flag = False,
    folder_out: Folder = None,
    by: Literal["link", "copy"] = "link",
    watch: Flag = False,
    backbone: Backbone = None,
    device: Device = "cpu",
    allow_download: Download = False,
    on: On = "here",
    out: Folder = None,
    actors: Count = 2,
    gpus_per_actor: Annotated[float, Parameter(metavar="N")] = 0.0,
    address: Address = None,
) -> None:
    """Classify pictures, with probabilities.

    PICTURE is a file or a folder, any number of them. A picture that is unlike all classes is called 'none of these'.
    A picture that cannot be read gets a line with the reason; the others are classified, and the exit code is 1.

    With --on ray, for millions of pictures, PICTURE is one folder of pictures, a parquet file, a folder of parquet
    files or a text file with one path per line. The answers are parquet files in --out; after a stop, the same command
    continues.

    For example:
      clipcil predict birds/ a.jpg b.jpg
      clipcil predict birds/ camera/ --csv > found.csv
      clipcil predict birds/ camera/ --watch --folder-out sorted/
      clipcil predict birds/ archive/ --on ray --out answers/

    Args:
        model: Folder of the model.
        pictures: Pictures, or folders of them.
        top: Number of classes to print for each picture.
        json: Print one JSON object per line.
        csv: Print CSV with a header.
        folder_out: Also sort the pictures into this folder, a folder for each class; originals are never moved.
        by: Sort with symbolic links or with copies.
        watch: Keep watching the folders, and classify new pictures, until Ctrl-C.
        on: here: in this process; ray: on a Ray cluster.
        out: Folder for the answers, with --on ray; every machine must be able to write to it.
        actors: Number of model replicas, with --on ray.
        gpus_per_actor: GPUs of each replica; with 0 it runs on the CPU.
        address: Address of a Ray cluster, or auto. Default: Ray is started on this machine.
    """
    with_ray = {"--out": out is not None, "--address": address is not None, "--gpus-per-actor": gpus_per_actor != 0}
    here = {"--json": json, "--csv": csv, "--folder-out": folder_out is not None, "--watch": watch}
    here |= {"--device": device != "cpu", "--allow-download": allow_download}
    check_place(on, with_ray, here)
    if on == "ray":
        predict_many(model, pictures, out, top, actors, gpus_per_actor, address, backbone)
        return
    from clipcil.classifier.classifier import load
    from clipcil.classifier.layout import check_swapped
    from clipcil.classifier.output import open_printer
    from clipcil.classifier.sorting import Sorter
    from clipcil.classifier.sources import expand
    from clipcil.classifier.watching import watch as new_pictures
    from clipcil.errors import UserError
    from clipcil.network import allow_downloads

    if json and csv:
        raise UserError("give --json or --csv, not both")
    if not pictures:
        raise UserError("name a picture or a folder of pictures")
    check_swapped(model, pictures[-1], "clipcil predict")
    batches = new_pictures(list(pictures)) if watch else iter([expand(pictures)])
    with allow_downloads(allow_download):
        classifier = load(model, backbone=backbone, device=device)
    sorter = Sorter(folder_out, by, classifier.classes) if folder_out is not None else None
    printer = open_printer(json, csv, min(top, len(classifier.classes)))
    asked = broken = 0
    for files in batches:
        for picture, prediction in _with_bar(classifier.predict_stream(files, top), len(files)):
            printer.line(picture, prediction)
            asked, broken = asked + 1, broken + (prediction.error is not None)
            if sorter is not None:
                sorter.put(picture, prediction)
        sys.stdout.flush()
    if broken:
        print(f"clipcil: {broken} of {asked} pictures cannot be read", file=sys.stderr)
        sys.exit(1)


def check_place(on: str, with_ray: dict[str, bool], here: dict[str, bool]) -> None:
    """Refuse options that would be ignored: those for Ray without --on ray, and those for local output with it."""
    from clipcil.errors import UserError

    ignored = [name for name, given in (here if on == "ray" else with_ray).items() if given]
    if ignored:
        why = "cannot be given with --on ray" if on == "ray" else "is for --on ray"
        more = "; answers are parquet files in --out" if on == "ray" else ""
        raise UserError(f"{ignored[0]} {why}{more}")


def predict_many(
    model: Path,
    sources: tuple[Path, ...],
    out: Path | None,
    top: int,
    actors: int,
    gpus: float,
    address: str | None,
    backbone: str | None,
) -> None:
    """Predict on Ray, with a bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    from clipcil.classifier.bulk import predict_on_ray
    from clipcil.errors import UserError

    if len(sources) != 1 or out is None:
        raise UserError("with --on ray give one folder, parquet file or list of paths, and --out for the answers")
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task("parts", total=None)
        counts = predict_on_ray(
            model,
            sources[0],
            out,
            top=top,
            actors=actors,
            gpus=gpus,
            address=address,
            backbone=backbone,
            on_progress=lambda done, total: bars.update(bar, completed=done, total=total),
        )
    print("{pictures} pictures in {parts} parts, {errors} cannot be read".format(**counts))
    print(f"answers in {out}")


def _with_bar(found: Iterator[tuple[Path, Prediction]], total: int) -> Iterable[tuple[Path, Prediction]]:
    """The same, with a bar on the terminal while there are many."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    quiet = not console.is_terminal or total < MANY
    return track(found, "pictures", total, console=console, disable=quiet, transient=True)

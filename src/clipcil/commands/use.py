"""Commands that use a model: `clipcil predict`, `test`, `show` and `export`."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from clipcil.commands.types import Address, Backbone, Count, Device, Download, File, Flag, Folder, Model, On, Pictures
from clipcil.errors import UserError, quoted

if TYPE_CHECKING:
    from clipcil.classifier.classifier import Classifier

PICTURES_FOR_A_BAR = 50
"""Minimum number of pictures for a progress bar."""
MISTAKES_SHOWN = 120
"""Maximum number of mistakes shown with their picture: with more, a page takes long to load."""
THUMBNAIL = 112
"""Pixels of the longer side of a picture on the page."""


def predict(
    model: Model,
    pictures: Annotated[tuple[Path, ...], Parameter(metavar="PICTURE…")],
    /,
    *,
    top: Count = 5,
    json: Flag = False,
    csv: Flag = False,
    folder_out: Folder = None,
    by: Literal["link", "copy"] = "link",
    watch: Flag = False,
    explain: Folder = None,
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
      clipcil predict birds/ a.jpg --explain why/
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
        explain: Also write a PNG for each picture into this folder: which parts of it speak for its class, and the most
            similar picture that is kept of the class.
        on: here: in this process; ray: on a Ray cluster.
        out: Folder for the answers, with --on ray; every machine must be able to write to it.
        actors: Number of model replicas, with --on ray.
        gpus_per_actor: GPUs of each replica; with 0 it runs on the CPU.
        address: Address of a Ray cluster, or auto. Default: Ray is started on this machine.
    """
    from clipcil.classifier.load import load
    from clipcil.classifier.sources import check_swapped, expand
    from clipcil.commands import text
    from clipcil.commands.folders import Sorter
    from clipcil.commands.folders import watch as new_pictures

    with_ray = {"--out": out is not None, "--address": address is not None, "--gpus-per-actor": gpus_per_actor != 0}
    here = {
        "--json": json,
        "--csv": csv,
        "--folder-out": folder_out is not None,
        "--watch": watch,
        "--explain": explain is not None,
    }
    here |= {"--device": device != "cpu", "--allow-download": allow_download}
    if on == "ray":
        _refuse(here, "cannot be given with --on ray; answers are parquet files in --out")
        if len(pictures) != 1 or out is None:
            raise UserError("with --on ray give one folder, parquet file or list of paths, and --out for the answers")
        from clipcil.classifier.bulk import predict_on_ray

        with text.progress_bar() as on_progress:
            counts = predict_on_ray(
                model,
                pictures[0],
                out,
                top=top,
                actors=actors,
                gpus=gpus_per_actor,
                address=address,
                backbone=backbone,
                on_progress=on_progress,
            )
        told = "{pictures} pictures in {parts} parts, {errors} cannot be read".format(**counts)
        text.say(told, f"answers in {out}")
        return
    _refuse(with_ray, "is for --on ray")
    if json and csv:
        raise UserError("give --json or --csv, not both")
    if not pictures:
        raise UserError("name a picture or a folder of pictures")
    check_swapped(model, pictures[-1], "clipcil predict")
    batches = new_pictures(list(pictures)) if watch else iter([expand(pictures)])
    classifier = load(model, backbone=backbone, device=device, allow_download=allow_download)
    sorter = Sorter(folder_out, by, classifier.classes) if folder_out is not None else None
    line = text.csv_printer(min(top, len(classifier.classes))) if csv else text.print_json if json else text.print_line
    asked = broken = 0
    explained: Counter[str] = Counter()
    for files in batches:
        with text.progress_bar(quiet=len(files) < PICTURES_FOR_A_BAR) as on_progress:
            for done, (picture, prediction) in enumerate(classifier.predict_stream(files, top), 1):
                line(picture, prediction)
                broken += prediction.error is not None
                if sorter is not None:
                    sorter.put(picture, prediction)
                if explain is not None and prediction.error is None:
                    explained[picture.name] += 1
                    number = f"-{explained[picture.name]}" if explained[picture.name] > 1 else ""
                    _explain(classifier, picture, explain / f"{picture.name}{number}.png")
                on_progress("pictures", done, len(files))
        asked += len(files)
        sys.stdout.flush()
    if broken:
        print(f"clipcil: {broken} of {asked} pictures cannot be read", file=sys.stderr)
        sys.exit(1)


def _explain(model: Classifier, picture: Path, out: Path) -> None:
    from clipcil.classifier.explain import MADE_BY
    from clipcil.storage import claim

    claim(out, MADE_BY, "explanation")
    model.explain(picture).save(out)


def _refuse(given: dict[str, bool], why: str) -> None:
    """Refuse an option that would be ignored."""
    for name, is_given in given.items():
        if is_given:
            raise UserError(f"{name} {why}")


def test(
    model: Model,
    folder: Pictures,
    /,
    *,
    page: File = None,
    json: Flag = False,
    subfolders: Flag = False,
    backbone: Backbone = None,
    device: Device = "cpu",
    allow_download: Download = False,
) -> None:
    """Test a model on labelled pictures that it was not taught: accuracy, results per class, confused pairs.

    FOLDER holds a folder of pictures for each class, as for `clipcil learn`. Pictures of classes that the model does
    not know count as unknown: the test says how many of them are recognised as none of the classes and how many are
    missed. The exit code is 1 if a picture cannot be read.

    For example:
      clipcil test birds/ new/
      clipcil test birds/ new/ --page mistakes.html

    Args:
        model: Folder of the model.
        folder: Folder of class folders.
        page: Write an HTML page too, with the mistakes sorted by confidence; it saves a list of corrections to learn.
        json: Print one JSON object.
        subfolders: Accept class folders that hold only folders of pictures.
    """
    from clipcil.classifier.load import load
    from clipcil.classifier.sources import check_swapped
    from clipcil.commands import text
    from clipcil.report.html import write_page

    check_swapped(model, folder, "clipcil test")
    classifier = load(model, backbone=backbone, device=device, allow_download=allow_download)
    with text.progress_bar(json) as on_progress:
        found = classifier.test(folder, subfolders=subfolders, on_progress=on_progress)
    if json:
        print(text.json_text(text.test_table(found), indent=1))
    else:
        text.test(classifier, found)
    if page is not None:
        mistakes = [(answer, _thumbnail(answer.picture)) for answer in found.mistakes[:MISTAKES_SHOWN]]
        command = f"clipcil learn {quoted(model)} fixes.csv"
        values = {"model": classifier, "found": found, "source": folder, "mistakes": mistakes, "command": command}
        write_page(page, "test.html", title="clipcil: test", **values)
        print(f"page: {page}", file=sys.stderr if json else sys.stdout)
        if mistakes and not json:
            text.say(f"to correct the model, tick mistakes on the page, save the list, and then: {command}")
    if found.unreadable:
        sys.exit(1)


def _thumbnail(picture: Path) -> bytes:
    from clipcil.data.pictures import decode, thumbnail

    try:
        return thumbnail(decode(picture, str(picture)), THUMBNAIL)
    except UserError:  # the file is gone again
        return b""


def show(model: Model, /, *, json: Flag = False) -> None:
    """Show what a model knows: its classes, when and from how many pictures each was learnt, and its accuracy.

    For example:
      clipcil show birds/

    Args:
        model: Folder of the model.
        json: Print it as JSON.
    """
    from clipcil.classifier.load import summarise
    from clipcil.commands import text

    summary = summarise(model)
    if json:
        print(text.json_text(summary, indent=1))
    else:
        text.show(summary, model)


def export(
    model: Model,
    /,
    *,
    out: Folder = None,
    format: Literal["pt2", "onnx"] = "pt2",
    backbone: Backbone = None,
    allow_download: Download = False,
) -> None:
    """Write a model as one file that runs without clipcil: vision tower and classifier in one.

    pt2 is read by torch.export.load, onnx by any ONNX runtime. Next to it are classes.json (names, preprocessing,
    temperature, threshold) and, where the method compares features with one vector for each class (simplecil, dmc),
    classifier.safetensors with these vectors.

    For example:
      clipcil export birds/ --out birds-onnx/ --format onnx

    Args:
        model: Folder of the model.
        out: Folder for the files. Default: the model's name followed by -export.
        format: pt2 or onnx.
    """
    from clipcil.classifier.export import export as write
    from clipcil.classifier.load import load
    from clipcil.commands import text

    folder = out if out is not None else model.resolve().with_name(f"{model.resolve().name}-export")
    classifier = load(model, backbone=backbone, allow_download=allow_download)
    text.say(f"written: {write(classifier, folder, format)}, classes.json beside it")

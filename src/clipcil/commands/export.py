"""`clipcil export`: a model for other programs."""

from __future__ import annotations

from typing import Literal

from clipcil.commands.learn import Model
from clipcil.commands.types import Backbone, Download, Folder


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
    from clipcil.classifier.classifier import load
    from clipcil.classifier.export import export as write
    from clipcil.errors import printable
    from clipcil.network import allow_downloads

    folder = out if out is not None else model.resolve().with_name(f"{model.resolve().name}-export")
    with allow_downloads(allow_download):
        classifier = load(model, backbone=backbone)
    print(printable(f"written: {write(classifier, folder, format)}, classes.json beside it"))

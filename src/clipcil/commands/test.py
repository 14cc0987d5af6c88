"""`clipcil test`: evaluate a model on labelled pictures."""

from __future__ import annotations

import sys

from clipcil.commands.learn import Model, Pictures
from clipcil.commands.types import Backbone, Device, Download, File, Flag


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
        page: Write an HTML page too, with the mistakes sorted by confidence.
        json: Print one JSON object.
        subfolders: Accept class folders that hold only folders of pictures.
    """
    from clipcil.classifier.classifier import load
    from clipcil.classifier.layout import check_swapped
    from clipcil.classifier.page import write_test_page
    from clipcil.classifier.teach import progress_bar
    from clipcil.classifier.testing import print_json, print_test

    check_swapped(model, folder, "clipcil test")
    classifier = load(model, backbone=backbone, device=device, allow_download=allow_download)
    with progress_bar(json) as on_progress:
        found = classifier.test(folder, subfolders=subfolders, on_progress=on_progress)
    (print_json if json else print_test)(classifier, found)
    if page is not None:
        write_test_page(classifier, found, str(folder), page)
        print(f"page: {page}", file=sys.stderr if json else sys.stdout)
    if found.unreadable:
        sys.exit(1)

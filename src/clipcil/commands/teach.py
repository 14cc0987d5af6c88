"""Commands that change a model: `clipcil learn`, `forget`, `rename`, `undo`, and `serve`, the web page for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from clipcil.commands.types import Backbone, Device, Download, Flag, Model, Name, NewBackbone, Number, Pictures, Words
from clipcil.errors import UserError, counted, printable, quoted
from clipcil.network import allow_downloads

if TYPE_CHECKING:
    from clipcil.classifier.classifier import Classifier

ClassName = Annotated[str, Parameter(metavar="CLASS")]


def learn(
    model: Model,
    folder: Pictures,
    /,
    *,
    method: Name = None,
    backbone: NewBackbone = None,
    seed: Annotated[int | None, Parameter(metavar="N")] = None,
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
      clipcil learn birds/ fixes.csv
      clipcil learn tuned/ week1/ --method dmc-ot

    Args:
        model: Folder of the model; created if it does not exist.
        folder: Folder of class folders, or the list of corrections that the page of `clipcil test` saves.
        method: Method of a new model; `clipcil methods` lists them. Default: strata.
        seed: Seed of a new model. Default: 0.
        set: Settings of the method, for a new model.
        hold_out: Keep the features of some pictures for evaluation, besides what the method itself keeps.
        skip_broken: Leave out pictures that cannot be decoded, and list them, instead of stopping.
        subfolders: Accept class folders that hold only folders of pictures.
        dry_run: Show what would be learnt, and learn nothing.
        quiet: Print one line with the result.
    """
    from clipcil.classifier.folder import refuse_other_folders
    from clipcil.classifier.load import load_or_new
    from clipcil.classifier.sources import check_swapped, read_source
    from clipcil.commands import text
    from clipcil.data.pictures import BrokenPictureError
    from clipcil.settings import parse_words

    check_swapped(model, folder, "clipcil learn")
    refuse_other_folders(model)
    dataset = read_source(folder, subfolders)
    choices: dict[str, Any] = {"method": method, "seed": seed, "settings": parse_words(set), "backbone": backbone}
    with allow_downloads(allow_download):
        if dry_run:
            classifier = load_or_new(model, **choices, device=device)
            text.plan(classifier, dataset, folder)
            with text.progress_bar(quiet) as on_progress:
                found = classifier.preview(dataset, on_progress=on_progress)
            text.preview(found, skip_broken)
            return
        with _changing(model, new=True, **choices, device=device) as classifier:
            if not quiet:
                text.plan(classifier, dataset, folder)
            with text.progress_bar(quiet) as on_progress:
                try:
                    lesson = classifier.learn(
                        dataset, hold_out=hold_out, skip_broken=skip_broken, on_progress=on_progress
                    )
                except BrokenPictureError as error:
                    raise UserError(f"{error}, or leave out all such pictures with --skip-broken") from error
    text.lesson(classifier, lesson, model, quiet)


def forget(
    model: Model,
    name: ClassName,
    /,
    *,
    yes: Flag = False,
    for_good: Flag = False,
    backbone: Backbone = None,
    allow_download: Download = False,
) -> None:
    """Remove a class from a model, with everything that is kept of it.

    It asks first. `clipcil undo` brings the class back until the next change; with --for-good nothing of it is left in
    the folder.

    For example:
      clipcil forget birds/ "house sparrow"

    Args:
        model: Folder of the model.
        name: The class.
        yes: Do not ask.
        for_good: Do not keep the model before it for clipcil undo.
    """
    from clipcil.classifier.folder import read_model
    from clipcil.commands import text

    facts = read_model(model)
    known = facts.known[facts.need(name)]
    if not yes and not sys.stdin.isatty():
        raise UserError(f"'{known.name}' is not forgotten without a question; say --yes where nobody can answer it")
    if not yes and not _agreed(f"Forget '{known.name}', learnt from {counted(known.pictures, 'picture')}?"):
        text.say("nothing was changed")
        return
    with allow_downloads(allow_download), _changing(model, not for_good, backbone=backbone) as classifier:
        classifier.forget(name)
    back = "" if for_good else f"; clipcil undo {quoted(model)} brings it back"
    text.say(f"{quoted(model)} has forgotten '{known.name}'{back}")


def _agreed(question: str) -> bool:
    try:
        return input(f"{printable(question)} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


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
    from clipcil.commands import text

    with allow_downloads(allow_download), _changing(model, backbone=backbone) as classifier:
        classifier.rename(old, new)
    text.say(f"'{old}' of {quoted(model)} is called '{new}' now")


def undo(model: Model, /) -> None:
    """Undo the last change of a model: a lesson, a new name or a forgotten class; undoing again restores it.

    The model before the last `clipcil learn`, `rename` or `forget` is kept until the next change.

    For example:
      clipcil undo birds/

    Args:
        model: Folder of the model.
    """
    from clipcil.classifier.folder import hold_model, read_model, restore_previous
    from clipcil.classifier.small_pictures import SmallPictures
    from clipcil.commands import text

    read_model(model)  # refuses other folders before a lock file is made in them
    with hold_model(model):
        before = read_model(model).known
        facts = restore_previous(model)
        SmallPictures(model).follow(before)
    lessons, classes = counted(facts.lessons, "lesson"), counted(len(facts.known), "class", "classes")
    text.say(f"{quoted(model)} is the model after {lessons} again, with {classes}")


def serve(
    model: Model,
    /,
    *,
    host: Annotated[str, Parameter(metavar="NAME")] = "127.0.0.1",
    port: Number = 7860,
    open: bool = True,
    method: Name = None,
    backbone: NewBackbone = None,
    device: Device = "cpu",
    allow_download: Download = False,
) -> None:
    """Serve a web page for teaching a model, and a JSON API.

    Everything stays on this machine. MODEL need not exist yet: the first lesson creates it. With a host other
    than this machine itself, every request needs a token, which is printed at the start.

    For example:
      clipcil serve birds/
      clipcil serve birds/ --host 0.0.0.0 --port 8000 --no-open

    Args:
        model: Folder of the model; created by the first lesson if it does not exist.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        open: Open the page in a browser.
        method: Method of a new model; `clipcil methods` lists them.
    """
    from clipcil.serve.server import serve_model

    with allow_downloads(allow_download):
        serve_model(model, host, port, open, method, backbone, device)


@contextmanager
def _changing(folder: Path, keep_previous: bool = True, new: bool = False, **choices: Any) -> Iterator[Classifier]:
    """The model in a folder, which stays locked; written back after the block. With `new` it need not exist yet."""
    from clipcil.classifier.folder import hold_model, read_model
    from clipcil.classifier.load import load_or_new
    from clipcil.classifier.small_pictures import SmallPictures

    if not new:
        read_model(folder)  # refuses other folders before a lock file is made in them
    with hold_model(folder):
        model = load_or_new(folder, **choices)
        before = model.class_facts
        yield model
        model.write(folder, keep_previous=keep_previous)
        SmallPictures(folder).follow(before)

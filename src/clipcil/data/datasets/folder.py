"""`folder`: any tree of class/picture, with folders train and test or a split by seed."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from clipcil.data.dataset import Dataset, SplitOptions, register
from clipcil.data.names import Template, folder_class
from clipcil.data.pictures import PictureSet, identity_of_files
from clipcil.data.sources import SUFFIXES, list_files, list_folders, no_pictures
from clipcil.data.tasks import split_by_class
from clipcil.errors import UserError
from clipcil.settings import options

TRAIN, TEST = ("train", "training"), ("test", "val", "valid", "validation")
JPEG2000 = (".jp2", ".j2k", ".jpx")


@options
class FolderOptions(SplitOptions):
    template: Template = "a photo of a {}."
    """The sentence about a class, {} standing for its name."""
    jpeg2000: bool = False
    """Also read JPEG 2000 files (.jp2, .j2k, .jpx). Only for your own: a hostile one takes minutes and 10 GB."""


@register(
    "folder", "your own pictures, a folder for each class", "class/picture, or train/ and test/ of these", FolderOptions
)
def open_folder(root: Path | None, options: FolderOptions) -> Dataset:
    if root is None:
        raise UserError("dataset folder: name the folder with a folder of pictures for each class with --data-root")
    suffixes = SUFFIXES.union(JPEG2000 if options.jpeg2000 else ())
    parts = {path.name.lower(): path for path in list_folders(root)}
    train = next((parts[name] for name in TRAIN if name in parts), None)
    test = next((parts[name] for name in TEST if name in parts), None)
    if train is not None and test is not None:
        names, inside = read_tree(train, suffixes)
        test_names, test_inside = read_tree(test, suffixes)
        if missing := [name for name in test_names if name not in names]:
            raise UserError(f"class '{missing[0]}' of {test} has no folder in {train}")
        learn = picture_files(f"{root.name} {train.name}", train, inside)
        check = picture_files(f"{root.name} {test.name}", test, test_inside)
        place = torch.tensor([names.index(name) for name in test_names])
        check = check.subset(torch.arange(len(check)), place[check.labels])
    else:
        home = train if train is not None and len(parts) == 1 else root
        names, inside = read_tree(home, suffixes)
        pictures = picture_files(home.name, home, inside)
        places = [path.relative_to(home).as_posix() for found in inside for path in found]
        learn, check = pictures.split(split_by_class(places, pictures.labels, options.test_share, options.split_seed))
    for pictures in (learn, check) if options.jpeg2000 else ():
        pictures.more_formats = ("JPEG2000",)
    return Dataset("folder", names, learn, check, (options.template,))


def read_tree(root: Path, suffixes: Iterable[str] = SUFFIXES) -> tuple[list[str], list[list[Path]]]:
    """Class names and the picture files of each class of a class/picture tree; pictures may be anywhere below.

    An empty class folder is an error: a class that silently vanished would shift every label after it.
    """
    folders = list_folders(root)
    if not folders:
        raise UserError(f"{root} has no folders; put the pictures of each class into a folder with its name")
    inside = [list_files(folder, suffixes) for folder in folders]
    for folder, found in zip(folders, inside, strict=True):
        if not found:
            raise no_pictures(folder, "; put some there or remove the folder")
    return [folder_class(folder.name) for folder in folders], inside


def picture_files(name: str, root: Path, classes: Sequence[Sequence[Path]]) -> PictureSet:
    """A set of picture files below `root`, from the files of each class."""
    files = [path for inside in classes for path in inside]
    labels = [label for label, inside in enumerate(classes) for _ in inside]
    return PictureSet(name, files, torch.tensor(labels, dtype=torch.int64), identity_of_files(files, root))

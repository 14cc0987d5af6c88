"""`folder`: any tree of class/picture, with folders train and test or a split by seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from clipcil.data.dataset import Dataset, SplitOptions, register
from clipcil.data.names import Template, clean_name
from clipcil.data.pictures import PictureSet, identity_of_files
from clipcil.data.sources import list_files, list_folders, no_pictures
from clipcil.data.tasks import split_by_class
from clipcil.errors import UserError
from clipcil.settings import options

TRAIN, TEST = ("train", "training"), ("test", "val", "valid", "validation")


@options
class FolderOptions(SplitOptions):
    template: Template = "a photo of a {}."
    """The sentence about a class, {} standing for its name."""


@register(
    "folder", "your own pictures, a folder for each class", "class/picture, or train/ and test/ of these", FolderOptions
)
def open_folder(root: Path | None, options: FolderOptions) -> Dataset:
    if root is None:
        raise UserError("dataset folder: name the folder with a folder of pictures for each class with --data-root")
    parts = {path.name.lower(): path for path in list_folders(root)}
    train = next((parts[name] for name in TRAIN if name in parts), None)
    test = next((parts[name] for name in TEST if name in parts), None)
    if train is not None and test is not None:
        return _given_split(root, train, test, options)
    if train is not None and len(parts) == 1:
        root = train
    names, files, labels = read_tree(root)
    pictures = picture_files(root.name, root, files, labels)
    places = [path.relative_to(root).as_posix() for path in files]
    is_test = split_by_class(places, labels, options.test_share, options.split_seed)
    return Dataset("folder", names, pictures.subset(~is_test), pictures.subset(is_test), (options.template,))


def _given_split(root: Path, train: Path, test: Path, options: FolderOptions) -> Dataset:
    names, files, labels = read_tree(train)
    test_names, test_files, test_labels = read_tree(test)
    if missing := [name for name in test_names if name not in names]:
        raise UserError(f"class '{missing[0]}' of {test} has no folder in {train}")
    place = torch.tensor([names.index(name) for name in test_names])
    return Dataset(
        "folder",
        names,
        picture_files(f"{root.name} {train.name}", train, files, labels),
        picture_files(f"{root.name} {test.name}", test, test_files, place[test_labels]),
        (options.template,),
    )


def read_tree(root: Path) -> tuple[list[str], list[Path], torch.Tensor]:
    """Class names, picture files and their labels of a class/picture tree; classes by name, pictures anywhere below.

    An empty class folder is an error: a class that silently vanished would shift every label after it.
    """
    folders = list_folders(root)
    if not folders:
        raise UserError(f"{root} has no folders; put the pictures of each class into a folder with its name")
    inside = [list_files(folder) for folder in folders]
    for folder, found in zip(folders, inside, strict=True):
        if not found:
            raise no_pictures(folder, "; put some there or remove the folder")
    return [clean_name(folder.name) for folder in folders], *label_files(inside)


def label_files(classes: Sequence[Sequence[Path]]) -> tuple[list[Path], torch.Tensor]:
    """The files of all classes in one list, and the class index of each."""
    files = [path for inside in classes for path in inside]
    return files, torch.arange(len(classes)).repeat_interleave(torch.tensor([len(inside) for inside in classes]))


def picture_files(name: str, root: Path, files: Sequence[Path], labels: torch.Tensor) -> PictureSet:
    """A set of picture files below `root`."""
    return PictureSet(name, list(files), labels, identity_of_files(files, root))

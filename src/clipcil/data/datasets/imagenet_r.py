"""`imagenet-r`: ImageNet-R, 200 classes drawn, painted, sewn, folded; 30,000 pictures (Hendrycks et al. 2021).

It has no official split. Three lists of 24,000 and 6,000 pictures circulate; clipcil does not distribute them. So the
default is a split by seed, the same on every machine, and a list can be given.
"""

import re
from pathlib import Path

import torch

from clipcil.data.dataset import Dataset, register
from clipcil.data.datasets.folder import picture_files
from clipcil.data.datasets.official import OfficialOptions, check_counts, need_home
from clipcil.data.names import clean_name
from clipcil.data.sources import SUFFIXES, list_files, list_folders
from clipcil.data.tasks import split_whole
from clipcil.errors import UserError
from clipcil.settings import options
from clipcil.storage import read_bytes, read_text

TITLE, NEEDS = "ImageNet-R", "the folder imagenet-r or imagenet-r.tar"
TEMPLATES = (
    "itap of a {}.",
    "a bad photo of the {}.",
    "a origami {}.",
    "a photo of the large {}.",
    "a {} in a video game.",
    "art of the {}.",
    "a photo of the small {}.",
)
"""The seven sentences that OpenAI published as the best few of its 80 for ImageNet ("itap": I took a picture of).
PROOF and ENGINE train with the first and average over all; CLAP4CLIP averages over the 80, of which these are part."""
_WNID = re.compile(r"n\d{8}")
_ENTRY = re.compile(r"n\d{8}/[^\s/'\",\]]+")
_SECTION = re.compile(r"^[\s\-#\[]*(train|test|val)(?:ing)?[\s:\]]*$", re.IGNORECASE | re.MULTILINE)


@options
class ImageNetROptions(OfficialOptions):
    train_list: Path | None = None
    """A list of training pictures (txt or yaml: whatever has n01443537/art_0.jpg in it), with its test_list."""
    test_list: Path | None = None
    """The list of test pictures."""
    split_list: Path | None = None
    """One text file with both: a line `train`, the training pictures, a line `test`, the test pictures."""

    def __post_init__(self) -> None:
        if (self.train_list is None) != (self.test_list is None):
            raise UserError("the data options train_list and test_list go together; give both")
        if self.split_list is not None and self.train_list is not None:
            raise UserError("give the data option split_list, or train_list and test_list, not all three")


@register("imagenet-r", "ImageNet-R, 200 classes, 30,000 renditions", NEEDS, ImageNetROptions)
def open_imagenet_r(root: Path | None, options: ImageNetROptions) -> Dataset:
    home = need_home(root or Path("data/imagenet-r"), TITLE, NEEDS, mark="n" + "[0-9]" * 8, archive="imagenet-r*")
    folders = [folder for folder in list_folders(home) if _WNID.fullmatch(folder.name)]
    said = _read_names(home / "README.txt")
    if unknown := [folder.name for folder in folders if folder.name not in said]:
        raise UserError(f"{home}/README.txt has no name for the folder {unknown[0]}; take that of ImageNet-R")
    inside = [list_files(folder) for folder in folders]
    files = [path for each in inside for path in each]
    if options.check:
        check_counts(home, TITLE, (len(folders), len(files)), (200, 30_000))
    pictures = picture_files("imagenet-r", home, inside)
    keys = [path.relative_to(home).as_posix() for path in files]
    if options.split_list or options.train_list:
        train, test, notes = _read_split(options, keys)
    else:
        test = split_whole(keys, options.test_share, options.split_seed)
        train, notes = ~test, ()
    names = [clean_name(said[folder.name]) for folder in folders]
    return Dataset("imagenet-r", names, pictures.subset(train), pictures.subset(test), TEMPLATES, notes)


def _read_names(path: Path) -> dict[str, str]:
    """`n01443537 goldfish` lines of the dataset's own README; the rest of it is prose."""
    if not path.is_file():
        raise UserError(f"{path} is missing: it has the class names of ImageNet-R; unpack the archive again")
    text = read_bytes(path, links=True).decode(errors="replace")
    return {wnid: name.strip() for wnid, name in re.findall(r"^[ \t]*(n\d{8})[ \t]+(\S[^\n]*)$", text, re.MULTILINE)}


def _read_split(options: ImageNetROptions, keys: list[str]) -> tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]:
    """Rows of the training and the test pictures, and remarks on lines and pictures that are not used.

    An entry is whatever looks like n01443537/art_0.jpg. The class is in the path, so label columns and `targets:` lists
    are not needed.
    """
    source = options.split_list or options.train_list
    texts = {"train": "", "test": ""}
    if options.split_list is not None:
        before, *sections = _SECTION.split(read_text(options.split_list, links=True))
        if stray := _ENTRY.findall(before):
            raise UserError(f"{source}: '{stray[0]}' comes before any line 'train' or 'test'")
        for name, text in zip(sections[::2], sections[1::2], strict=True):
            texts["train" if name.lower() == "train" else "test"] += text
    elif options.train_list is not None and options.test_list is not None:
        texts = {"train": read_text(options.train_list, links=True), "test": read_text(options.test_list, links=True)}
    place = {key: row for row, key in enumerate(keys)}
    rows: dict[str, list[int]] = {}
    notes: list[str] = []
    for part, text in texts.items():
        entries = set(_ENTRY.findall(text))
        strange = sorted(entries - place.keys())
        if missing := [entry for entry in strange if Path(entry).suffix.lower() in SUFFIXES]:
            raise UserError(f"{source}: {len(missing)} {part} pictures are not there, the first is {missing[0]}")
        notes += [f"{source}: skipped '{entry}', which is not a picture" for entry in strange]
        rows[part] = sorted(place[entry] for entry in entries if entry in place)
        if not rows[part]:
            raise UserError(f"{source} names no {part} pictures; entries look like n01443537/art_0.jpg")
    if both := set(rows["train"]) & set(rows["test"]):
        raise UserError(f"{source}: {len(both)} pictures are in both parts, such as {keys[min(both)]}")
    if left := len(keys) - len(rows["train"]) - len(rows["test"]):
        notes.append(f"{source}: {left} pictures of the folder are in neither part and are not used")
    return torch.tensor(rows["train"]), torch.tensor(rows["test"]), tuple(notes)

"""`cub200`: CUB-200-2011, 200 birds, 11,788 pictures (Wah et al. 2011); the official folder or archive."""

from pathlib import Path
from typing import Literal

import torch

from clipcil.data.dataset import Dataset, register
from clipcil.data.datasets.official import OfficialOptions, check_counts, need_home
from clipcil.data.names import clean_name
from clipcil.data.pictures import PictureSet, identity_of_files
from clipcil.data.tasks import split_whole
from clipcil.errors import UserError
from clipcil.settings import options
from clipcil.storage import read_text

TITLE, NEEDS = "CUB-200-2011", "CUB_200_2011.tgz or the folder in it"
TEMPLATES = ("a photo of a {}, a type of bird.",)
"""The one sentence that OpenAI published for birds, and the only one of PROOF and ENGINE on this dataset."""


@options
class CubOptions(OfficialOptions):
    split: Literal["official", "random"] = "official"
    """official: 5,994 training pictures, 30 in most classes, and 5,794 test pictures; random: 80/20, as much of the
    field does."""


@register("cub200", "CUB-200-2011, 200 birds, 11,788 pictures", NEEDS, CubOptions)
def open_cub200(root: Path | None, options: CubOptions) -> Dataset:
    home = need_home(root or Path("data/cub200"), TITLE, NEEDS, mark="images.txt", archive="CUB_200_2011*")
    classes, images, labels, official = (
        _pairs(home / f"{name}.txt") for name in ("classes", "images", "image_class_labels", "train_test_split")
    )
    if not images or not (images.keys() == labels.keys() == official.keys()) or set(labels.values()) - classes.keys():
        raise UserError(f"the lists of pictures and classes in {home} do not fit together; unpack the archive again")
    if options.check:
        check_counts(home, TITLE, (len(classes), len(images)), (200, 11_788))
    files = [home / "images" / name for name in images.values()]
    if missing := [path for path in files if not path.is_file()]:
        raise UserError(f"{len(missing)} pictures are missing, the first is {missing[0]}; unpack the archive again")
    places = {number: index for index, number in enumerate(sorted(classes, key=int))}
    label = torch.tensor([places[labels[key]] for key in images])
    pictures = PictureSet("cub200", files, label, identity_of_files(files, home / "images"))
    if options.split == "official":
        is_test = torch.tensor([official[key] == "0" for key in images])
    else:
        is_test = split_whole(list(images.values()), options.test_share, options.split_seed)
    # "001.Black_footed_Albatross" → "Black footed Albatross"
    names = [clean_name(classes[number].split(".", 1)[-1], hyphens=True) for number in places]
    return Dataset("cub200", names, *pictures.split(is_test), TEMPLATES)


def _pairs(path: Path) -> dict[str, str]:
    """Lines of `number value`; blank lines are skipped."""
    lines = [line.strip().split(maxsplit=1) for line in read_text(path, links=True).splitlines() if line.strip()]
    if wrong := [line for line in lines if len(line) < 2 or not line[0].isdecimal()]:
        raise UserError(f"{path}: '{' '.join(wrong[0])[:60]}' is not a number and a value")
    return dict(lines)

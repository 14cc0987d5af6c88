"""`cifar100`: 100 classes of 32×32 pictures, 50,000 for training and 10,000 for the test (Krizhevsky 2009).

The authors' "python version" consists of pickles. A pickle can run any code, so a file is read only if its MD5 is the
one that its authors published.
"""

import hashlib
import pickle
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from clipcil.data.dataset import Dataset, NoOptions, register
from clipcil.data.datasets.official import find_home, not_there
from clipcil.data.datasets.parquet import read_parquet
from clipcil.data.names import clean_name
from clipcil.data.pictures import LazyPictures, PictureSet
from clipcil.errors import UserError
from clipcil.storage import read_bytes

_KINDS = ("", "blurry ", "black and white ", "low contrast ", "high contrast ", "bad ", "good ")
TEMPLATES = tuple(
    template
    for article in ("a", "the")
    for template in (
        *(f"a {kind}photo of {article} {{}}." for kind in _KINDS),
        f"a photo of {article} small {{}}.",
        f"a photo of {article} big {{}}.",
    )
)
"""The 18 sentences that OpenAI published for CIFAR, which PROOF, ENGINE and CLAP4CLIP average over."""
MD5 = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}
"""As published with the dataset."""


@register("cifar100", "CIFAR-100, 100 classes, 32×32", "cifar-100-python(.tar.gz) or the Hugging Face parquet files")
def open_cifar100(root: Path | None, options: NoOptions) -> Dataset:
    folder = root or Path("data/cifar100")
    files = {part: sorted(folder.glob(f"**/{part}-*.parquet")) for part in ("train", "test")}
    home = find_home(folder, mark="meta", archive="cifar-100-python.tar.gz")
    if home is not None:
        names = [clean_name(name.decode()) for name in _load(home / "meta")[b"fine_label_names"]]
        return Dataset("cifar100", names, _pictures(home, "train"), _pictures(home, "test"), TEMPLATES)
    if not all(files.values()):
        parquet = "train-*.parquet and test-*.parquet of uoft-cs/cifar100 on Hugging Face"
        raise not_there(folder, "CIFAR-100", f"cifar-100-python.tar.gz, or {parquet},")
    train, test = (read_parquet(files[part], name=f"cifar100 {part}") for part in ("train", "test"))
    names = train.names or []
    if (len(train.pictures), len(test.pictures), len(names)) != (50_000, 10_000, 100):
        raise UserError(f"{folder} is not the whole of CIFAR-100; download it again, or use --data parquet")
    return Dataset("cifar100", names, train.picture_set(names), test.picture_set(names), TEMPLATES)


def _pictures(home: Path, part: str) -> PictureSet:
    table = _load(home / part)
    planes = table[b"data"].reshape(-1, 3, 32, 32)  # red, green, blue
    pictures = LazyPictures(len(planes), lambda place: Image.fromarray(planes[place].transpose(1, 2, 0).copy()))
    labels = torch.tensor(table[b"fine_labels"], dtype=torch.int64)
    return PictureSet(f"cifar100 {part}", pictures, labels, f"cifar100-{MD5[part][:16]}")


def _load(path: Path) -> dict[bytes, Any]:
    content = read_bytes(path, links=True)
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != MD5[path.name]:
        raise UserError(f"{path} is not the official file of CIFAR-100 (MD5 {found}) and is not opened")
    table: dict[bytes, Any] = pickle.loads(content, encoding="bytes")
    return table

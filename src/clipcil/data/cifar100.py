"""`cifar100`: 100 classes of 32×32 pictures, 50,000 for training and 10,000 for the test (Krizhevsky 2009)."""

from __future__ import annotations

from pathlib import Path

from clipcil.data.dataset import Dataset, NoOptions, register
from clipcil.data.parquet import read_parquet
from clipcil.errors import UserError

TEMPLATES = ("a photo of a {}.", "a blurry photo of a {}.", "a low contrast photo of a {}.", "a photo of the small {}.")


@register("cifar100", "CIFAR-100, 100 classes, 32×32", "a folder with the Hugging Face parquet files")
def open_cifar100(root: Path | None, options: NoOptions) -> Dataset:
    folder = root or Path("data/cifar100")
    train, test = sorted(folder.glob("**/train-*.parquet")), sorted(folder.glob("**/test-*.parquet"))
    if not train or not test:
        raise UserError(
            f"CIFAR-100 is not in {folder}: put train-*.parquet and test-*.parquet of the Hugging Face dataset"
            " uoft-cs/cifar100 there, or name their folder with --data-root"
        )
    learn, check = (
        read_parquet(files, name=f"cifar100 {split}") for files, split in ((train, "train"), (test, "test"))
    )
    if learn.names is None or len(learn.names) != 100:
        raise UserError(f"{train[0]} does not name the 100 classes of CIFAR-100 in its metadata")
    names = [name.replace("_", " ") for name in learn.names]
    return Dataset("cifar100", names, learn.pictures, check.pictures, TEMPLATES)

"""`cifar100`: 100 classes of 32×32 pictures, 50,000 for training and 10,000 for the test (Krizhevsky 2009)."""

from __future__ import annotations

from pathlib import Path

from clipcil.data.cifar_pickle import find_python_version, read_python_version
from clipcil.data.dataset import Dataset, NoOptions, register
from clipcil.data.names import clean_name
from clipcil.data.parquet import read_parquet
from clipcil.errors import UserError

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
COUNTS = {"train": 50_000, "test": 10_000}


@register("cifar100", "CIFAR-100, 100 classes, 32×32", "cifar-100-python(.tar.gz) or the Hugging Face parquet files")
def open_cifar100(root: Path | None, options: NoOptions) -> Dataset:
    folder = root or Path("data/cifar100")
    if (source := find_python_version(folder)) is not None:
        names, (learn, check) = read_python_version(source)
        return Dataset("cifar100", [clean_name(name) for name in names], learn, check, TEMPLATES)
    train, test = sorted(folder.glob("**/train-*.parquet")), sorted(folder.glob("**/test-*.parquet"))
    if not train or not test:
        raise UserError(
            f"CIFAR-100 is not in {folder}: put cifar-100-python.tar.gz there, or train-*.parquet and test-*.parquet"
            " of the Hugging Face dataset uoft-cs/cifar100, or name their folder with --data-root"
        )
    tables = {"train": read_parquet(train, name="cifar100 train"), "test": read_parquet(test, name="cifar100 test")}
    for part, table in tables.items():
        if len(table.pictures) != COUNTS[part]:
            raise UserError(
                f"{folder} has {len(table.pictures)} {part} pictures, CIFAR-100 has {COUNTS[part]}; download it again,"
                " or use --data parquet for another set"
            )
    classes = tables["train"].names
    if classes is None or len(classes) != 100 or tables["test"].names != classes:
        raise UserError(f"{train[0]} does not name the 100 classes of CIFAR-100 in its metadata")
    return Dataset("cifar100", classes, tables["train"].pictures, tables["test"].pictures, TEMPLATES)

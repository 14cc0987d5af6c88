"""`emoji`: the embedded dataset, 100 things drawn in several styles, as ImageNet-R is; needs no download."""

from importlib import resources
from pathlib import Path

import torch

from clipcil.data.dataset import Dataset, NoOptions, register
from clipcil.data.datasets.parquet import read_parquet


@register("emoji", "100 things × 8 drawing styles, 64×64, embedded", "nothing")
def open_emoji(root: Path | None, options: NoOptions) -> Dataset:
    with resources.as_file(resources.files("clipcil.data") / "emoji" / "emoji.parquet") as file:
        table = read_parquet([file], name="emoji")
    assert table.names is not None
    is_test = torch.tensor([split == "test" for split in table.splits])
    # Ours: there is no published list for drawings of emoji.
    templates = ("a photo of a {}.", "a drawing of a {}.", "an icon of a {}.", "a picture of a {}.")
    return Dataset("emoji", table.names, *table.picture_set(table.names).split(is_test), templates)

"""The embedded dataset is whole: classes, styles, the split, the pictures, and the licences they come under."""

import io
import itertools
import json
from collections import Counter
from importlib.resources import files

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from clipcil.data.dataset import open_dataset

FOLDER = files("clipcil.data") / "emoji"
STYLES = {"noto", "noto-blob", "twemoji", "fluent-3d", "fluent-flat", "fluent-modern", "openmoji", "openmoji-black"}
LICENCES = {
    "Apache-2.0": "Apache License",
    "CC-BY-4.0": "Attribution 4.0 International",
    "CC-BY-SA-4.0": "Attribution-ShareAlike 4.0 International",
    "MIT": "MIT License",
}


def test_every_class_in_every_style_once_in_hugging_faces_layout() -> None:
    table = pq.read_table(pa.BufferReader((FOLDER / "emoji.parquet").read_bytes()))
    assert table.schema.field("image").type == pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert list(features) == table.column_names == ["image", "label", "style", "split"]
    assert (features["image"]["_type"], features["label"]["_type"]) == ("Image", "ClassLabel")
    names, rows = features["label"]["names"], table.to_pylist()
    assert len(names) == 100 and names == sorted(set(names))
    assert sorted((row["label"], row["style"]) for row in rows) == sorted(itertools.product(range(100), STYLES))
    assert all(row["image"]["path"] == f"{names[row['label']]}/{row['style']}.png" for row in rows)
    tested = [row for row in rows if row["split"] == "test"]
    assert {row["split"] for row in rows} == {"train", "test"}
    assert sorted(row["label"] for row in tested) == [label for label in range(100) for _ in range(2)]
    per_style = Counter(row["style"] for row in tested)
    assert set(per_style) == STYLES and all(24 <= count <= 26 for count in per_style.values())


def test_pictures_are_whole_and_different() -> None:
    data, seen = open_dataset("emoji"), set()
    for picture in data.train.pictures:  # the whole list, of which both parts are rows
        with Image.open(io.BytesIO(picture)) as image:
            assert (image.format, image.size, image.mode) == ("PNG", (64, 64), "RGB")
            seen.add(image.tobytes())
            grey = np.asarray(image.convert("L"))
        assert (grey >= 250).mean() > 1 / 20, "it stands on white"
        assert (grey < 225).mean() > 1 / 30, "it is almost empty"
    assert len(seen) == 800


def test_every_style_is_attributed_with_a_licence_that_is_there() -> None:
    for licence, words in LICENCES.items():
        assert words in (FOLDER / f"LICENSE-{licence}.txt").read_text("utf-8")[:300]
    lines = (FOLDER / "ATTRIBUTION.md").read_text("utf-8").splitlines()
    cells = [line.split("|") for line in lines if line.startswith("| `")]
    assert {each[1].strip("` ") for each in cells} == STYLES
    assert {each[-2].strip() for each in cells} == set(LICENCES)

"""The embedded dataset is whole: classes, styles, the split, the pictures, and the licences they come under."""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from importlib.resources import files
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

FOLDER = files("clipcil.data") / "emoji"
STYLES = {"noto", "noto-blob", "twemoji", "fluent-3d", "fluent-flat", "fluent-modern", "openmoji", "openmoji-black"}
LICENCES = {
    "Apache-2.0": "Apache License",
    "CC-BY-4.0": "Attribution 4.0 International",
    "CC-BY-SA-4.0": "Attribution-ShareAlike 4.0 International",
    "MIT": "MIT License",
}


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return pq.read_table(pa.BufferReader((FOLDER / "emoji.parquet").read_bytes()))


@pytest.fixture(scope="module")
def rows(table: pa.Table) -> list[dict[str, Any]]:
    return table.to_pylist()


def test_every_class_in_every_style_once_in_hugging_faces_layout(table: pa.Table, rows: list[dict[str, Any]]) -> None:
    assert table.schema.field("image").type == pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert list(features) == table.column_names == ["image", "label", "style", "split"]
    assert (features["image"]["_type"], features["label"]["_type"]) == ("Image", "ClassLabel")
    names = features["label"]["names"]
    assert len(names) == 100 and names == sorted(set(names))
    assert sorted((row["label"], row["style"]) for row in rows) == sorted(itertools.product(range(100), STYLES))
    assert all(row["image"]["path"] == f"{names[row['label']]}/{row['style']}.png" for row in rows)


def test_two_styles_of_each_class_are_tested_and_every_style_about_equally(rows: list[dict[str, Any]]) -> None:
    tested = [row for row in rows if row["split"] == "test"]
    assert {row["split"] for row in rows} == {"train", "test"}
    assert sorted(row["label"] for row in tested) == [label for label in range(100) for _ in range(2)]
    per_style = Counter(row["style"] for row in tested)
    assert set(per_style) == STYLES and all(24 <= count <= 26 for count in per_style.values())


def test_pictures_are_whole_and_different(rows: list[dict[str, Any]]) -> None:
    seen: set[bytes] = set()
    for row in rows:
        with Image.open(io.BytesIO(row["image"]["bytes"])) as picture:
            assert (picture.format, picture.size, picture.mode) == ("PNG", (64, 64), "RGB")
            seen.add(picture.tobytes())
            histogram = picture.convert("L").histogram()
        assert sum(histogram[250:]) > 64 * 64 // 20, f"{row['image']['path']} is not on white"
        assert sum(histogram[:225]) > 64 * 64 // 30, f"{row['image']['path']} is almost empty"
    assert len(seen) == len(rows) == 800


def test_every_style_is_attributed_with_a_licence_that_is_there() -> None:
    for licence, words in LICENCES.items():
        assert words in (FOLDER / f"LICENSE-{licence}.txt").read_text("utf-8")[:300]
    lines = (FOLDER / "ATTRIBUTION.md").read_text("utf-8").splitlines()
    cells = [line.split("|") for line in lines if line.startswith("| `")]
    assert {each[1].strip("` ") for each in cells} == STYLES
    assert {each[-2].strip() for each in cells} == set(LICENCES)

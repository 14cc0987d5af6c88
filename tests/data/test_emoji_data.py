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


@pytest.fixture(scope="module")
def names(table: pa.Table) -> list[str]:
    return json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]["label"]["names"]


def test_layout_is_hugging_faces(table: pa.Table) -> None:
    assert table.schema.field("image").type == pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    assert table.schema.field("label").type == pa.int64()
    assert table.column_names == ["image", "label", "style", "split"]
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert list(features) == table.column_names
    assert features["image"]["_type"] == "Image"
    assert features["label"]["_type"] == "ClassLabel"


def test_a_hundred_plain_names_in_order(names: list[str]) -> None:
    assert len(set(names)) == len(names) == 100
    assert names == sorted(names)
    assert all(name.isascii() and name.isalpha() and name.islower() for name in names)
    assert "octopus" in names


def test_every_class_in_every_style_once(rows: list[dict[str, Any]], names: list[str]) -> None:
    assert sorted((row["label"], row["style"]) for row in rows) == sorted(itertools.product(range(100), STYLES))
    assert all(row["image"]["path"] == f"{names[row['label']]}/{row['style']}.png" for row in rows)


def test_two_styles_of_each_class_are_tested_and_every_style_about_equally(rows: list[dict[str, Any]]) -> None:
    assert {row["split"] for row in rows} == {"train", "test"}
    tested = [row for row in rows if row["split"] == "test"]
    per_class, per_style = Counter(row["label"] for row in tested), Counter(row["style"] for row in tested)
    assert [per_class[label] for label in range(100)] == [2] * 100
    assert set(per_style) == STYLES
    assert all(24 <= count <= 26 for count in per_style.values())
    pairs = {frozenset(row["style"] for row in tested if row["label"] == label) for label in range(100)}
    assert len(pairs) == 28  # all pairs of eight styles


def test_pictures_are_whole_and_different(rows: list[dict[str, Any]]) -> None:
    seen: dict[bytes, str] = {}
    for row in rows:
        with Image.open(io.BytesIO(row["image"]["bytes"])) as picture:
            assert (picture.format, picture.size, picture.mode) == ("PNG", (64, 64), "RGB")
            pixels = picture.tobytes()
            histogram = picture.convert("L").histogram()
        path = row["image"]["path"]
        assert sum(histogram[250:]) > 64 * 64 // 20, f"{path} is not on white"
        assert sum(histogram[:225]) > 64 * 64 // 30, f"{path} is almost empty"
        assert pixels not in seen, f"{path} is the same picture as {seen[pixels]}"
        seen[pixels] = path


def test_small_enough_to_ship() -> None:
    assert sum(len(entry.read_bytes()) for entry in FOLDER.iterdir()) < 5_000_000


@pytest.mark.parametrize("licence", LICENCES)
def test_licence_texts_are_there(licence: str) -> None:
    text = (FOLDER / f"LICENSE-{licence}.txt").read_text("utf-8")
    assert LICENCES[licence] in text[:300]
    assert len(text) > 1000


def test_every_style_is_attributed_with_a_licence_that_is_there(rows: list[dict[str, Any]]) -> None:
    lines = (FOLDER / "ATTRIBUTION.md").read_text("utf-8").splitlines()
    licence_of = {
        cells[1].strip("` "): cells[-2].strip()
        for line in lines
        if line.startswith("| `") and (cells := line.split("|"))
    }
    assert set(licence_of) == {row["style"] for row in rows}
    assert set(licence_of.values()) == set(LICENCES)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clipcil.data.dataset import Dataset, open_dataset
from clipcil.data.datasets import hub as hub_set
from clipcil.errors import UserError
from support.made_up import encoded, write_lines


def write(path: Path, labels: Any, names: list[str] | None = None, **columns: Any) -> Path:
    """A file as Hugging Face writes it: {bytes, path} pictures; class names in the metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": encoded(i), "path": f"{i}.png"} for i in range(len(labels))]
    table = pa.table({"image": images, "label": labels, **columns})
    if names is not None:
        features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path)
    return path


def opened(root: Path, **options: object) -> Dataset:
    return open_dataset("parquet", root, options)


def refused(said: str, root: Path, **options: object) -> None:
    with pytest.raises(UserError) as caught:
        opened(root, **options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
        ("data/train.parquet", "data/validation.parquet"),
        ("default/train/0000.parquet", "default/test/0000.parquet"),
        ("split=train/0.parquet", "split=test/0.parquet"),
    ],
)
def test_parts_by_file_name(tmp_path: Path, train: str, test: str) -> None:
    write(tmp_path / train, [0, 1, 1], ["big_cat", "dog"])
    write(tmp_path / test, [1], ["big_cat", "dog"])
    data = opened(tmp_path)
    assert data.classes == ["big cat", "dog"]
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 1, 1], [1])
    assert data.train.image(2).size == (8, 8)


def test_several_files_are_one_part_and_one_without_rows_adds_nothing(tmp_path: Path) -> None:
    for number in range(3):
        first = write(tmp_path / f"train-{number}.parquet", [number], ["a", "b", "c"])
    pq.write_table(pq.read_table(first).slice(0, 0), tmp_path / "train-9.parquet")
    write(tmp_path / "test-0.parquet", [0, 1, 2], ["a", "b", "c"])
    data = opened(tmp_path)
    assert data.train.labels.tolist() == [0, 1, 2]
    assert [data.train.image(i).size for i in range(3)] == [(8, 8)] * 3
    names = write_lines(tmp_path / "names.txt", ["a", "b"])
    assert len(opened(tmp_path / "train-9.parquet", names=names).train) == 0


def test_text_labels_of_both_parts_make_one_list(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", ["owl", "cat", "dog"])
    write(tmp_path / "test.parquet", ["owl", "dog"])
    data = opened(tmp_path)
    assert data.classes == ["cat", "dog", "owl"]
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([2, 0, 1], [2, 1])


def test_a_split_column_or_a_split_by_seed(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["x", "y"] * 5, split=["train"] * 8 + ["test"] * 2)
    assert (len(opened(tmp_path).train), len(opened(tmp_path).test)) == (8, 2)
    write(tmp_path / "b" / "all.parquet", ["x", "y"] * 5)
    data = opened(tmp_path / "b" / "all.parquet", test_share=0.4)
    assert data.test.labels.bincount().tolist() == [2, 2]


def test_bare_numbers_need_names(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [0, 0, 1, 1])
    refused("names=FILE", tmp_path)
    for lines in (["cat", "dog"], ["cat", "dog", "", " "]):
        assert opened(tmp_path, names=write_lines(tmp_path / "names.txt", lines)).classes == ["cat", "dog"]
    refused("class 1", tmp_path, names=write_lines(tmp_path / "blank.txt", ["cat", "", "dog"]))
    refused("label 1", tmp_path, names=write_lines(tmp_path / "few.txt", ["cat"]))
    refused("none.txt", tmp_path, names=tmp_path / "none.txt")


def test_columns_are_named_where_several_could_be_meant(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["x", "y", "x", "y"], photo=[encoded(9)] * 4)
    refused("image=NAME (columns: image, label, photo)", tmp_path)
    assert len(opened(tmp_path, image="photo").train) == 2
    refused("image=NAME (columns: image, label, photo)", tmp_path, image="pic")
    refused("'image'", tmp_path, image="photo", label="image")


@pytest.mark.parametrize(
    ("labels", "names", "said"),
    [
        ([0, 1, None], ["a", "b"], "1 empty labels"),
        (pa.array(["x", None]).dictionary_encode(), None, "1 empty labels"),
        ([0, -1], ["a", "b"], "label -1"),
        ([0, 2], ["a", "b"], "label 2"),
        ([0.5, 1.5], None, "'label'"),
        ([0, 1], ["a", "A"], "'a' and 'A'"),
        (pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xff\xfe", b"ab"]).buffers()), None, "UTF-8"),
    ],
)
def test_wrong_labels(tmp_path: Path, labels: Any, names: list[str] | None, said: str) -> None:
    write(tmp_path / "a.parquet", labels, names)
    refused(said, tmp_path)


@pytest.mark.parametrize(
    "columns",
    [
        {"day": pa.array([2**30, 1], pa.date32())},
        {"hour": pa.array([2**62, 1], pa.timestamp("us", "Mars/Phobos"))},
        {"split": pa.array([b"train", b"test"]).cast(pa.binary())},
    ],
)
def test_what_other_columns_hold_does_not_matter(tmp_path: Path, columns: dict[str, Any]) -> None:
    write(tmp_path / "a.parquet", ["x", "x"], **columns)
    assert len(opened(tmp_path, image="image").train) == 1


def test_labels_and_parts_that_are_categories(tmp_path: Path) -> None:
    """What pandas writes for a category: numbers, and a list of what they stand for."""
    labels, parts = pa.array(["y", "x", "x_", "y"]), pa.array(["train", "test", "train", "test"])
    write(tmp_path / "a.parquet", labels.dictionary_encode(), split=parts.dictionary_encode())
    data = opened(tmp_path)
    assert data.classes == ["x", "y"] and data.train.labels.tolist() == [1, 0] == data.test.labels.tolist()[::-1]


@pytest.mark.parametrize("metadata", ['{"info": {"features": [1]}}', '{"info": {"features": "x"}}', "half", "[]"])
def test_metadata_that_name_nothing_are_passed_over(tmp_path: Path, metadata: str) -> None:
    table = pa.table({"image": [encoded(0), encoded(1)], "label": ["a", "b"]})
    pq.write_table(table.replace_schema_metadata({"huggingface": metadata}), tmp_path / "a.parquet")
    assert opened(tmp_path).classes == ["a", "b"]


def test_columns_that_cannot_be_what_they_are_named_for(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["x", "y"], number=[1, 2], file=[{"path": "a"}, {"path": "b"}])
    for name in ("number", "file", "label"):
        refused(f"'{name}'", tmp_path, image=name)
    twice = pa.Table.from_arrays([pa.array([encoded(0)]), *[pa.array(["x"])] * 2], ["image", "label", "label"])
    pq.write_table(twice, tmp_path / "a.parquet")
    refused("label=NAME", tmp_path, label="label")


def test_wrong_files(tmp_path: Path) -> None:
    refused("*.parquet", tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else PAR1")
    refused("a.parquet", tmp_path)
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    refused("image=NAME", tmp_path)
    write(tmp_path / "a.parquet", [0, 1], ["a", "b"])
    write(tmp_path / "b.parquet", ["a", "b"])
    refused("different columns", tmp_path)
    (tmp_path / "b.parquet").unlink()
    write(tmp_path / "train.parquet", [0], ["a", "b"])
    write(tmp_path / "test.parquet", [0], ["b", "a"])
    refused("names=FILE", tmp_path)


def test_a_null_picture_is_a_broken_picture(tmp_path: Path) -> None:
    images = [{"bytes": encoded(0), "path": "a"}, {"bytes": None, "path": "b.png"}]
    pq.write_table(pa.table({"image": images, "label": ["a", "a"]}), tmp_path / "x.parquet")
    data = opened(tmp_path)
    with pytest.raises(UserError, match="picture 1"):
        (data.train if int(data.train.rows[0]) == 1 else data.test).image(0)


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for each revision stands for the hub."""
    empty, full, asked = tmp_path / "main", tmp_path / "converted", list[Any]()
    empty.mkdir()
    for part in ("train", "test"):
        write(full / f"default/{part}/0000.parquet", [0, 1], ["a", "b"])

    def download(repo: str, revision: str | None, **how: Any) -> str:
        asked.append((repo, revision, how["repo_type"]))
        if revision not in (None, hub_set.CONVERTED):
            raise OSError("no such revision\nand many more lines")
        return str(full if revision else empty)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert open_dataset("hub", None, {"repo": "some/birds"}).classes == ["a", "b"]
    assert asked == [("some/birds", revision, "dataset") for revision in (None, hub_set.CONVERTED)]
    write(full / "extra/train/0000.parquet", [0, 1], ["a", "b"])
    assert len(open_dataset("hub", None, {"repo": "some/birds", "config": "default"}).train) == 2
    for options, said in (
        ({"repo": "some/birds"}, "config=NAME"),
        ({"repo": "some/birds", "config": "nope"}, "'nope'"),
        ({"repo": "some/birds", "revision": "v9"}, "no such revision"),
        ({"repo": "birds"}, "repo=owner/name"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            open_dataset("hub", None, options)
        assert "\n" not in str(caught.value)


def test_the_hub_offline_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="some/birds") as caught:
        open_dataset("hub", None, {"repo": "some/birds"})
    assert "\n" not in str(caught.value)

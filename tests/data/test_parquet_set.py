import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clipcil.data.dataset import Dataset, open_dataset
from clipcil.data.datasets.parquet import CONVERTED
from support import made_up
from support.errors import one_line
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


refused = partial(made_up.refused, "parquet")


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train-{}-of-00002.parquet", "test-00000-of-00001.parquet"),
        ("data/train-{}.parquet", "data/validation.parquet"),
        ("default/train/{}.parquet", "default/test/0000.parquet"),
        ("split=train/{}.parquet", "split=test/0.parquet"),
    ],
)
def test_parts_by_file_name(tmp_path: Path, train: str, test: str) -> None:
    """Several files are one part; one without rows adds nothing."""
    names = ["big_cat", "dog", "owl"]
    files = [write(tmp_path / train.format(number), [number, 1], names) for number in range(3)]
    pq.write_table(pq.read_table(files[0]).slice(0, 0), tmp_path / train.format(9))
    write(tmp_path / test, [1], names)
    data = opened(tmp_path)
    assert data.classes == ["big cat", "dog", "owl"]
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 1, 1, 1, 2, 1], [1])
    assert [data.train.image(i).size for i in range(6)] == [(8, 8)] * 6


def test_text_labels_of_both_parts_make_one_list(tmp_path: Path) -> None:
    """A category is what pandas writes: numbers, and a list of what they stand for."""
    for category in (False, True):
        for part, labels in (("train", ["owl", "cat_", "dog"]), ("test", ["owl", "dog"])):
            write(tmp_path / f"{part}.parquet", pa.array(labels).dictionary_encode() if category else labels)
        data = opened(tmp_path)
        assert data.classes == ["cat", "dog", "owl"]
        assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([2, 0, 1], [2, 1])


def test_a_split_column_or_a_split_by_seed(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["x", "y"] * 5, split=["train"] * 8 + ["test"] * 2)
    assert (len(opened(tmp_path).train), len(opened(tmp_path).test)) == (8, 2)
    write(tmp_path / "b" / "all.parquet", ["x", "y"] * 5, split=[0] * 10)
    data = opened(tmp_path / "b" / "all.parquet", test_share=0.4)
    assert data.test.labels.bincount().tolist() == [2, 2]


def test_bare_numbers_need_names(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [0, 0, 1, 1])
    refused("names=FILE", tmp_path)
    assert opened(tmp_path, names=write_lines(tmp_path / "names.txt", ["cat", "dog", ""])).classes == ["cat", "dog"]
    refused("class 1", tmp_path, names=write_lines(tmp_path / "blank.txt", ["cat", "", "dog"]))
    refused("label 1", tmp_path, names=write_lines(tmp_path / "few.txt", ["cat"]))
    write(tmp_path / "a.parquet", ["cat", "owl"])
    refused("'owl'", tmp_path, names=tmp_path / "names.txt")


def test_columns_are_named_where_several_could_be_meant(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["x", "y", "x", "y"], photo=[encoded(9)] * 4, file=[{"path": "a"}] * 4)
    refused("image=NAME (columns: image, label, photo, file)", tmp_path)
    assert len(opened(tmp_path, image="photo").train) == 2
    refused("'image'", tmp_path, image="photo", label="image")
    refused("'file'", tmp_path, image="file")


def test_wrong_files_and_labels(tmp_path: Path) -> None:
    refused("*.parquet", tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else PAR1")
    refused("a.parquet", tmp_path)
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    refused("image=NAME", tmp_path)
    for labels, said in (([0, 1, None], "1 empty labels"), ([0.5, 1.5], "'label'")):
        write(tmp_path / "a.parquet", labels, ["a", "b"])
        refused(said, tmp_path)
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
    with one_line("picture 1"):
        (data.train if int(data.train.rows[0]) == 1 else data.test).image(0)


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for each revision stands for the hub; offline, the real one is asked first."""
    with monkeypatch.context() as offline:
        offline.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        offline.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        made_up.refused("hub", "some/birds", None, repo="some/birds")
    empty, full, asked = tmp_path / "main", tmp_path / "converted", list[Any]()
    empty.mkdir()
    for part in ("train", "test"):
        write(full / f"default/{part}/0000.parquet", [0, 1], ["a", "b"])

    def download(repo: str, revision: str | None, **how: Any) -> str:
        asked.append((repo, revision, how["repo_type"]))
        if revision not in (None, CONVERTED):
            raise OSError("no such revision\nand many more lines")
        return str(full if revision else empty)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert open_dataset("hub", None, {"repo": "some/birds"}).classes == ["a", "b"]
    assert asked == [("some/birds", revision, "dataset") for revision in (None, CONVERTED)]
    write(full / "extra/train/0000.parquet", [0, 1], ["a", "b"])
    assert len(open_dataset("hub", None, {"repo": "some/birds", "config": "default"}).train) == 2
    for options, said in (
        ({"repo": "some/birds"}, "config=NAME"),
        ({"repo": "some/birds", "revision": "v9"}, "no such revision"),
        ({"repo": "birds"}, "repo=owner/name"),
    ):
        made_up.refused("hub", said, None, **options)

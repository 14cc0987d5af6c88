from __future__ import annotations

from pathlib import Path

import pytest

from clipcil.data.dataset import Dataset, open_dataset
from support.made_up import imagenet_r_tree, refused, write_lines

ALL = [f"{wnid}/art_{i}.jpg" for wnid in ("n01443537", "n01484850", "n02106662") for i in range(5)]


def opened(root: Path, **options: object) -> Dataset:
    return open_dataset("imagenet-r", root, {"check": "no", **options})


def names(data: Dataset, part: str) -> list[str]:
    pictures = getattr(data, part)
    return ["/".join(Path(pictures.describe(i)).parts[-2:]) for i in range(len(pictures))]


def test_folder_with_names_from_its_readme(tmp_path: Path) -> None:
    home = imagenet_r_tree(tmp_path)
    data = opened(home)
    assert data.classes == ["goldfish", "great white shark", "German shepherd dog"]
    assert (len(data.train), len(data.test)) == (12, 3)
    assert sorted(names(data, "train") + names(data, "test")) == ALL
    assert names(opened(home, split_seed=1), "test") != names(data, "test")


def test_yaml_lists(tmp_path: Path) -> None:
    home = imagenet_r_tree(tmp_path)
    lists = {}
    for part, entries in (("train", ALL[3:]), ("test", ALL[:3])):
        lines = ["data:", *(f"- data/imagenet-r/{part}/{entry}" for entry in entries)]
        lines += ["targets:", *("- 7" for _ in entries)]
        lists[f"{part}_list"] = write_lines(tmp_path / f"imagenet-r_{part}.yaml", lines)
    data = opened(home, **lists)
    assert (names(data, "test"), names(data, "train")) == (ALL[:3], ALL[3:])
    assert data.test.labels.tolist() == [0, 0, 0], "the class is in the path; targets are not trusted"
    assert data.notes == ()
    flow = tmp_path / "flow.yaml"
    flow.write_text(f"data: ['{ALL[0]}', \"{ALL[1]}\", {ALL[2]}]\ntargets: [0, 0, 0]\n")
    assert names(opened(home, **{**lists, "test_list": flow}), "test") == ALL[:3]


def test_one_text_list_with_a_stray_line(tmp_path: Path) -> None:
    home = imagenet_r_tree(tmp_path)
    path = write_lines(tmp_path / "split.txt", ["train", *ALL[5:], "n02106662/test_img_R.py", "", "test", *ALL[:4]])
    data = opened(home, split_list=path)
    assert (names(data, "test"), names(data, "train")) == (ALL[:4], ALL[5:])
    assert len(data.notes) == 2
    assert "n02106662/test_img_R.py" in data.notes[0] and " 1 pictures" in data.notes[1]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["train", ALL[0]], "no test pictures"),
        ([ALL[0]], ALL[0]),
        (["train", ALL[0], "test", "n01443537/art_99.jpg"], "n01443537/art_99.jpg"),
        (["train", ALL[0], "test", ALL[0]], ALL[0]),
    ],
)
def test_a_list_that_does_not_fit_is_refused(tmp_path: Path, lines: list[str], said: str) -> None:
    home = imagenet_r_tree(tmp_path)
    refused("imagenet-r", said, home, check="no", split_list=write_lines(tmp_path / "list.txt", lines))


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    home = imagenet_r_tree(tmp_path)
    refused("imagenet-r", "train_list and test_list", home, train_list="x")
    refused("imagenet-r", "split_list", home, train_list="x", test_list="y", split_list="z")
    write_lines(home / "README.txt", ["n01443537 goldfish"])
    refused("imagenet-r", "n01484850", home, check="no")

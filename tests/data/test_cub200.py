from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
from made_up import cub_tree, shared_data, write_lines

from clipcil.data.dataset import open_dataset
from clipcil.errors import UserError


def test_real_archive_has_the_official_split(own_cache: Path) -> None:
    archive = shared_data("CUB_200_2011-64px.tgz")
    data = open_dataset("cub200", archive)
    assert (len(data.classes), len(data.train), len(data.test)) == (200, 5994, 5794)
    assert data.classes[:2] + data.classes[-1:] == ["Black footed Albatross", "Laysan Albatross", "Common Yellowthroat"]
    assert data.train.labels.bincount().max() == 30
    assert data.train.image(0).size == (64, 64)
    assert Path(data.train.describe(0)).name == "Black_Footed_Albatross_0009_34.jpg"
    random = open_dataset("cub200", archive.parent, {"split": "random", "split_seed": "1993"})
    assert (len(random.train), len(random.test)) == (9430, 2358)
    assert random.train.identity == data.train.identity, "both splits share what is cached"


def test_folder_and_archive_layouts(tmp_path: Path) -> None:
    home = cub_tree(tmp_path)
    with tarfile.open(tmp_path / "CUB_200_2011.tgz", "w:gz") as tar:
        tar.add(home, "CUB_200_2011")
    for root in (home, tmp_path, tmp_path / "CUB_200_2011.tgz"):
        data = open_dataset("cub200", root, {"check": "no"})
        assert data.classes == ["Grey a tailed Bird", "Grey b tailed Bird", "Grey c tailed Bird"]
        assert data.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
        assert len(data.test) == 9
    shutil.rmtree(home)
    assert len(open_dataset("cub200", tmp_path, {"check": "no"}).test) == 9, "the archive in the folder is found"


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    def says(text: str, root: Path, check: str = "no") -> None:
        with pytest.raises(UserError) as caught:
            open_dataset("cub200", root, {"check": check})
        assert text in str(caught.value)
        assert "\n" not in str(caught.value)

    says("put the official CUB_200_2011.tgz", tmp_path / "nowhere")
    says("has no images.txt", tmp_path)
    home = cub_tree(tmp_path)
    says("lists 3 classes and 15 pictures, but CUB-200-2011 has 200 and 11788", home, "yes")
    whole = (home / "images.txt").read_text()
    for line, text in (
        ("no number", "line 16"),
        ("1 again.jpg", "come once"),
        ("16 ../../etc/passwd", "leads out"),
        ("16 /etc/passwd", "leads out"),
        ("16  /etc/passwd", "leads out"),
        ("16 \t../../etc/passwd", "leads out"),
        (f"{'9' * 5000} a/b.jpg", "line 16"),
        ("16 a/b.jpg", "name different pictures"),
    ):
        (home / "images.txt").write_text(whole + line)
        says(text, home)
    (home / "images.txt").write_bytes(b"\xff\xfe")
    says("is not UTF-8 text", home)
    (home / "images.txt").write_text(whole)
    write_lines(home / "image_class_labels.txt", [f"{i} 9" for i in range(1, 16)])
    says("class 9, not in classes.txt", home)
    write_lines(home / "image_class_labels.txt", [f"{i} x" for i in range(1, 16)])
    says("not two whole numbers", home)
    write_lines(home / "image_class_labels.txt", [f"{i} {'9' * 5000}" for i in range(1, 16)])
    says("not two whole numbers", home)
    write_lines(home / "image_class_labels.txt", [f"{i} 1" for i in range(1, 16)])
    next((home / "images").rglob("*.jpg")).unlink()
    says("1 pictures of CUB are missing", home)
    (home / "train_test_split.txt").unlink()
    says("has no train_test_split.txt", home)

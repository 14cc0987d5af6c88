from __future__ import annotations

from pathlib import Path

from clipcil.data.dataset import open_dataset
from support.made_up import cub_tree, refused, shared_data, write_lines


def test_the_real_archive_has_the_official_split(own_cache: Path) -> None:
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


def test_the_classes_and_the_official_split(tmp_path: Path) -> None:
    cub_tree(tmp_path)
    data = open_dataset("cub200", tmp_path, {"check": "no"})
    assert data.classes == ["Grey a tailed Bird", "Grey b tailed Bird", "Grey c tailed Bird"]
    assert data.train.labels.tolist() == [0, 0, 1, 1, 2, 2] and len(data.test) == 9


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    home = cub_tree(tmp_path)
    whole = (home / "images.txt").read_text()
    for line, words in (("no number", "'no number'"), ("16 a/b.jpg", str(home))):
        (home / "images.txt").write_text(whole + line)
        refused("cub200", words, home, check="no")
    (home / "images.txt").write_text(whole)
    write_lines(home / "image_class_labels.txt", [f"{i} 9" for i in range(1, 16)])
    refused("cub200", str(home), home, check="no")
    write_lines(home / "image_class_labels.txt", [f"{i} 1" for i in range(1, 16)])
    missing = next((home / "images").rglob("*.jpg"))
    missing.unlink()
    refused("cub200", missing.name, home, check="no")

from __future__ import annotations

from pathlib import Path

import pytest

from clipcil.data.dataset import open_dataset
from support.made_up import class_tree, encoded, picture, refused


def test_a_tree_is_split_by_seed(tmp_path: Path) -> None:
    root = class_tree(tmp_path / "mine", {"black_bear": 10, "Ünïcode 🐱": 5, "one": 1})
    data = open_dataset("folder", root, {"template": "my {}."})
    assert data.classes == ["black bear", "one", "Ünïcode 🐱"]
    assert data.templates == ("my {}.",)
    assert data.train.labels.bincount().tolist() == [8, 1, 4]
    assert data.test.labels.bincount(minlength=3).tolist() == [2, 0, 1]
    both = {data.train.describe(i) for i in range(13)} | {data.test.describe(i) for i in range(3)}
    assert len(both) == 16
    again = open_dataset("folder", root, {"split_seed": "1"})
    assert {again.test.describe(i) for i in range(3)} != {data.test.describe(i) for i in range(3)}
    assert data.train.image(0).size == (8, 8)


def test_the_same_split_wherever_the_folder_is(tmp_path: Path) -> None:
    tests = []
    for place in ("a", "b"):
        root = class_tree(tmp_path / place / "mine", {"cat": 20, "dog": 20})
        data = open_dataset("folder", root)
        tests.append([Path(data.test.describe(i)).relative_to(root) for i in range(len(data.test))])
    assert tests[0] == tests[1]


@pytest.mark.parametrize("test", ["test", "val", "Validation"])
def test_given_parts(tmp_path: Path, test: str) -> None:
    class_tree(tmp_path / "train", {"cat": 3, "dog": 2, "owl": 1})
    class_tree(tmp_path / test, {"cat": 1, "owl": 2})
    data = open_dataset("folder", tmp_path)
    assert data.classes == ["cat", "dog", "owl"]
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 2]
    assert data.test.labels.tolist() == [0, 2, 2]


def test_a_train_folder_alone_is_split(tmp_path: Path) -> None:
    class_tree(tmp_path / "train", {"cat": 5, "dog": 5})
    assert open_dataset("folder", tmp_path).test.labels.tolist() == [0, 1]


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    def says(root: Path | None, words: str, **options: str) -> None:
        refused("folder", words, root, **options)

    says(None, "--data-root")
    says(tmp_path / "nowhere", "nowhere")
    file = picture(tmp_path / "file.png")
    says(file, "file.png")
    (tmp_path / "empty").mkdir()
    says(tmp_path / "empty", "has no folders")
    says(class_tree(tmp_path / "x", {"cat": 1}).parent, "there are no pictures in")
    tree = class_tree(tmp_path / "y", {"Cat": 2, "cat": 2})
    says(tree, "'Cat' and 'cat'")
    says(class_tree(tmp_path / "z", {"a_b": 2, "a b": 2}), "'a b' and 'a b'")
    says(class_tree(tmp_path / "w", {"___": 2, "b": 2}), "empty name")
    says(class_tree(tmp_path / "v", {"a": 2}), "template", template="no place")
    says(tmp_path / "v", "test_share", test_share="1.5")
    class_tree(tmp_path / "u" / "train", {"cat": 2})
    class_tree(tmp_path / "u" / "test", {"dog": 2})
    says(tmp_path / "u", "class 'dog' of")


def test_linked_class_folders_and_loops(tmp_path: Path) -> None:
    class_tree(tmp_path / "store", {"cat": 4})
    root = class_tree(tmp_path / "mine", {"dog": 4})
    (root / "cat").symlink_to(tmp_path / "store" / "cat")
    (root / "dog" / "again").symlink_to(root / "dog")
    data = open_dataset("folder", root)
    assert data.classes == ["cat", "dog"]
    assert len(data.train) + len(data.test) == 8


def test_a_file_with_the_wrong_ending_is_read_by_its_contents(tmp_path: Path) -> None:
    root = class_tree(tmp_path, {"a": 2})
    (root / "a" / "0.png").write_bytes(encoded(5, "JPEG"))
    data = open_dataset("folder", root)
    assert {data.train.image(0).size, data.test.image(0).size} == {(8, 8)}

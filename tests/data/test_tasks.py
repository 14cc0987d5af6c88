"""From a dataset to tasks: class orders, sizes, the stream, and splits by seed."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clipcil.clip import CLIP
from clipcil.data.dataset import Dataset
from clipcil.data.pictures import PictureSet
from clipcil.data.reader import Reader
from clipcil.data.tasks import ICARL, TaskStream, class_order, split_by_class, split_by_group, split_whole, task_sizes
from clipcil.errors import UserError
from support.errors import one_line
from support.made_up import encoded

HUNDRED = [f"class {i}" for i in range(100)]


def test_the_fields_orders() -> None:
    assert class_order("seed:1993", HUNDRED)[:10] == [68, 56, 78, 8, 23, 84, 90, 65, 74, 76]
    two_hundred = class_order("seed:1993", [str(i) for i in range(200)])
    assert two_hundred[:10] == [168, 136, 51, 9, 183, 101, 171, 99, 42, 159]
    assert class_order("natural", HUNDRED) == list(range(100))
    assert class_order("icarl", HUNDRED)[:10] == [87, 0, 52, 58, 44, 91, 68, 97, 51, 15]
    assert sorted(ICARL) == list(range(100))


@pytest.mark.parametrize(
    "text", ["2\n0\n1\n", "2,0,1", "[2, 0, 1]", "- 2\n- 0\n- 1\n", "c, d\na\nb-e", "\ufeffc, d\n\n a \n1\n"]
)
def test_orders_from_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "order.txt"
    path.write_text(text, encoding="utf-8")
    assert class_order(str(path), ["a", "b-e", "c, d"]) == [2, 0, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [(b"0\n1\n", "'c' (2)"), (b"0\n1\n1\n2\n", "'b' (1)"), (b"0\n1\n3\n", "'3'"), (b"0\nzebra\n", "'zebra'"),
     (b"\xff\xfe\x00", "UTF-8"), (b"", "'a' (0)")],
)  # fmt: skip
def test_wrong_order_files_name_what_is_wrong(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "order.txt"
    path.write_bytes(text)
    with one_line(said):
        class_order(str(path), ["a", "b", "c"])


@pytest.mark.parametrize("spec", ["seed:", "seed:x", "seed:-1", "seed:²", f"seed:{2**32}", "icarl", "nowhere.txt"])
def test_wrong_orders(spec: str) -> None:
    with one_line(spec):
        class_order(spec, ["a", "b"])


@pytest.mark.parametrize(
    ("chosen", "sizes"),
    [
        ({"classes": 100}, [10] * 10),
        ({"classes": 100, "tasks": 20}, [5] * 20),
        ({"classes": 10, "tasks": 4}, [3, 3, 3, 1]),
        ({"classes": 100, "tasks": 30}, [4] * 10 + [3] * 20),
        ({"classes": 100, "base": 50, "increment": 10}, [50, 10, 10, 10, 10, 10]),
        ({"classes": 100, "base": 50, "tasks": 6}, [50, 10, 10, 10, 10, 10]),
        ({"classes": 7, "increment": 3}, [3, 3, 1]),
        ({"classes": 3}, [1, 1, 1]),
        ({"classes": 5, "base": 5, "tasks": 1}, [5]),
        ({"classes": 5, "base": 4}, [4, 1]),
    ],
)
def test_task_sizes(chosen: dict[str, int], sizes: list[int]) -> None:
    assert task_sizes(**chosen) == sizes


@given(st.integers(1, 60), st.integers(1, 60), st.none() | st.integers(1, 60))
def test_task_sizes_cover_every_class(classes: int, tasks: int, base: int | None) -> None:
    try:
        sizes = task_sizes(classes, tasks, base=base)
    except UserError:
        assert tasks > classes or (base is not None and (base > classes or tasks - 1 > classes - base or tasks == 1))
        return
    assert (sum(sizes), len(sizes)) == (classes, tasks) and min(sizes) >= 1
    assert base is None or sizes[0] == base


def dataset(train: list[int], test: list[int], classes: int = 4) -> Dataset:
    def make(name: str, labels: list[int]) -> PictureSet:
        return PictureSet(name, [encoded(i) for i in range(len(labels))], torch.tensor(labels, dtype=torch.int64), name)

    return Dataset("made", [f"name {i}" for i in range(classes)], make("train", train), make("test", test))


def test_the_stream_hands_out_each_class_once_with_labels_in_order(tiny_clip: CLIP) -> None:
    data = dataset([0, 1, 2, 3, 0, 1, 2, 3], [3, 2, 1, 0])
    stream = TaskStream(data, Reader(tiny_clip, None), [2, 0, 3, 1], [1, 3])
    seen = []
    for task in stream.tasks():
        seen.append((task.names, task.pictures.labels.tolist(), stream.test(task.index).labels.tolist()))
        last = task
    assert seen == [(["name 2"], [0, 0], [0]), (["name 0", "name 3", "name 1"], [1, 1, 2, 2, 3, 3], [1, 2, 3])]
    with one_line("train"):
        _ = last.pictures.pixels


def test_a_joint_stream_hands_out_the_pictures_of_all_classes_so_far(tiny_clip: CLIP) -> None:
    data = dataset([0, 1, 2, 3, 0, 1, 2, 3], [3, 2, 1, 0])
    stream = TaskStream(data, Reader(tiny_clip, None), [2, 0, 3, 1], [1, 2, 1], joint=True)
    seen = [(len(task.names), task.pictures.labels.tolist(), len(task.pictures.pixels)) for task in stream.tasks()]
    assert seen == [(1, [0, 0], 2), (2, [0, 0, 1, 1, 2, 2], 6), (1, [0, 0, 1, 1, 2, 2, 3, 3], 8)]


def test_the_stream_refuses_what_cannot_be_learnt_or_measured(tiny_clip: CLIP) -> None:
    for train, test, said in (([0, 2, 3], [0, 1, 2, 3], "'name 1'"), ([0, 1, 2, 3], [0, 1], "task 2")):
        with one_line(said):
            TaskStream(dataset(train, test), Reader(tiny_clip, None), [0, 1, 2, 3], [2, 2])


def test_held_out_pictures_take_the_place_of_the_test_pictures_and_shots_leave_those_alone() -> None:
    whole = dataset([0] * 5 + [1] * 3 + [2] * 3 + [3] * 4, [0, 1, 2, 3])
    data = whole.hold_out(2, seed=1)
    assert torch.bincount(data.train.labels).tolist() == [3, 1, 1, 2]
    assert torch.bincount(data.test.labels).tolist() == [2, 2, 2, 2]
    assert sorted([*data.train.rows.tolist(), *data.test.rows.tolist()]) == whole.train.rows.tolist()
    assert data.test.identity == whole.train.identity  # training pictures, not test pictures
    assert torch.equal(whole.hold_out(2, seed=1).test.rows, data.test.rows)
    assert not torch.equal(whole.hold_out(2, seed=2).test.rows, data.test.rows)
    with one_line("'name 1' of made", "3"):
        whole.hold_out(3, seed=1)
    few = whole.shrink(4, seed=1)
    assert torch.bincount(few.train.labels).tolist() == [4, 3, 3, 4] and few.test is whole.test


NAMES = [f"n{i % 7:08}/art_{i}.jpg" for i in range(100)]


def test_the_whole_split_is_the_same_everywhere() -> None:
    """Known rows: a change of these changes every published number that used the split."""
    test = split_whole(NAMES, 0.2, 0)
    assert int(test.sum()) == 20
    assert torch.nonzero(test).flatten().tolist()[:6] == [1, 5, 9, 12, 15, 17]  # as sha256sum and sort give them
    assert not torch.equal(test, split_whole(NAMES, 0.2, 1))
    for total, train in ((30_000, 24_000), (11_788, 9_430)):  # the field's
        assert int((~split_whole([str(i) for i in range(total)], 0.2, 3)).sum()) == train


@given(st.randoms(use_true_random=False), st.integers(0, 2**40))
def test_the_order_of_files_does_not_matter(shuffler: random.Random, seed: int) -> None:
    mixed = NAMES.copy()
    shuffler.shuffle(mixed)
    found = []
    for names in (NAMES, mixed):
        labels = torch.tensor([int(name[8]) for name in names])
        splits = split_whole(names, 0.2, seed), split_by_class(names, labels, 0.2, seed)
        found.append([{name for name, test in zip(names, split, strict=True) if test} for split in splits])
    assert found[0] == found[1]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.floats(0.05, 0.95))
def test_every_class_keeps_training_pictures_and_gets_test_pictures(sizes: list[int], share: float) -> None:
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    test = split_by_class([str(i) for i in range(len(labels))], labels, share, 0)
    for label, size in enumerate(sizes):
        inside = test[labels == label]
        assert int((~inside).sum()) >= 1
        assert int(inside.sum()) >= (size > 1)


def test_groups_stay_together() -> None:
    labels = torch.arange(2).repeat_interleave(50)
    groups = [f"{i // 5 % 10:02}" for i in range(100)]
    test = split_by_group(groups, labels, 0.2, 0)
    for label in (0, 1):
        rows = (labels == label).nonzero().flatten().tolist()
        sides = {group: {bool(test[r]) for r in rows if groups[r] == group} for group in set(groups)}
        assert all(len(side) == 1 for side in sides.values())
        assert sum(side == {True} for side in sides.values()) == 2

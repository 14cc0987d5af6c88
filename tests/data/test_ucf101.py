from pathlib import Path

import numpy as np
import pytest

from clipcil.data.dataset import Dataset, open_dataset
from clipcil.data.datasets.ucf101 import VideoClip, middles, read_frames
from support.errors import one_line
from support.made_up import picture, refused, shared_data, write_lines


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Middle frames called like their clips, 10 groups of 2 clips for each class."""
    clips = [(group, clip) for group in range(1, 11) for clip in (1, 2)]
    for number, name in enumerate(("YoYo", "HandStandPushups", "HammerThrow", "Hammering")):
        for group, clip in clips:
            file = tmp_path / "frames" / name / f"v_{name}_g{group:02}_c{clip:02}.jpg"
            picture(file, number * 100 + group * 2 + clip)
    return tmp_path


def opened(root: Path, **options: object) -> Dataset:
    return open_dataset("ucf101", root, {"check": "no", **options})


def groups(data: Dataset, part: str) -> set[str]:
    pictures = getattr(data, part)
    return {Path(pictures.describe(i)).stem.split("_c")[0] for i in range(len(pictures))}


def test_a_folder_of_frames_has_the_fields_classes_and_groups(tree: Path) -> None:
    data = opened(tree, split="random")
    assert data.classes == ["Hammering", "Hammer Throw", "Handstand Pushups"], "official order and spelling, no YoYo"
    assert (len(data.train), len(data.test)) == (48, 12)
    assert data.templates[0] == "a photo of a person {}." and data.train.image(0).size == (8, 8)
    assert opened(tree, split="random", classes="101").classes[-1] == "Yo Yo"
    by_group = opened(tree, split="groups")
    assert len(by_group.test) == 12 and not groups(by_group, "train") & groups(by_group, "test")
    assert groups(data, "train") & groups(data, "test")


def test_official_lists(tree: Path) -> None:
    refused("ucf101", "list02.txt", tree, check="no", split="2")
    lists = tree / "elsewhere"
    names = {"HammerThrow": "HammerThrow", "Hammering": "Hammering", "HandstandPushups": "HandStandPushups"}
    for part, numbers in (("train", range(3, 11)), ("test", range(1, 3))):
        lines = [f"{f}/v_{n}_g{g:02}_c{c:02}.avi" for f, n in names.items() for g in numbers for c in (1, 2)]
        write_lines(lists / f"{part}list02.txt", [line + " 7" * (part == "train") for line in lines])
    data = opened(tree, split="2", lists=lists)
    assert (len(data.train), len(data.test)) == (48, 12)
    assert {name[-3:] for name in groups(data, "test")} == {"g01", "g02"}


def test_folders_of_numbered_frames(tmp_path: Path) -> None:
    for clip in ("v_Diving_g01_c01", "v_Diving_g02_c01", "v_Archery_g01_c01", "v_Archery_g02_c01"):
        for number in range(1, 12):
            picture(tmp_path / clip / f"frame{number}.png", number, (number, 4))
    data = opened(tmp_path, split="groups", test_share=0.5)
    assert [Path(data.train.describe(i)).name for i in range(2)] == ["frame6.png", "frame6.png"]
    each = opened(tmp_path, split="groups", test_share=0.5, frames=3, pool="each")
    assert [Path(each.train.describe(i)).name for i in range(3)] == ["frame2.png", "frame6.png", "frame10.png"]
    assert each.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    with one_line("v_"):
        opened(tmp_path, split="groups", test_share=0.5, frames=3).train.image(0)


def test_real_clips(own_cache: Path) -> None:
    pytest.importorskip("av")
    root = shared_data("ucf101-clips")
    data = opened(root, split="random")
    assert data.classes == ["Apply Eye Makeup", "Bench Press", "Diving"]
    assert (len(data.train), len(data.test)) == (12, 3)
    image = data.train.image(0)
    assert image.size == (320, 240) and np.asarray(image).std() > 20
    (kept,) = (own_cache / "frames").rglob("*.jpg")  # one clip was asked for, one was decoded
    before = kept.stat().st_mtime_ns
    assert np.array_equal(np.asarray(data.train.image(0)), np.asarray(image))
    assert kept.stat().st_mtime_ns == before
    clip = VideoClip("x", "x", "01", (sorted(root.glob("*.avi"))[0],))
    frames = [np.asarray(frame, dtype=float) for frame in read_frames(clip, 3)]
    assert np.abs(frames[0] - frames[2]).mean() > 1, "different moments"
    mean = opened(root, split="random", frames=3)
    first = next(i for i in range(12) if "ApplyEyeMakeup_g01_c01" in mean.train.describe(i))
    assert np.abs(np.asarray(mean.train.image(first), dtype=float) - np.mean(frames, axis=0)).mean() < 2
    each = opened(root, split="random", frames=2, pool="each")
    assert (len(each.train), len(each.test)) == (24, 6)


def test_damaged_clips_are_named(tmp_path: Path) -> None:
    pytest.importorskip("av")
    real = sorted(shared_data("ucf101-clips").glob("*.avi"))[0].read_bytes()
    path = tmp_path / "v_Diving_g01_c01.avi"
    for content in (b"", b"not a video" * 50, real[:3000]):
        path.write_bytes(content)
        with one_line(path.name):
            read_frames(VideoClip("x", "x", "1", (path,)), 1)
    path.write_bytes(real[: len(real) // 2])
    assert read_frames(VideoClip("x", "x", "1", (path,)), 2)[1].size == (320, 240)


def test_what_is_wrong_is_named(tree: Path) -> None:
    refused("ucf101", "UCF-101", tree / "nowhere")
    refused("ucf101", "4 classes and 80 clips", tree)
    for folder in ("a", "b"):
        (tree / "twice" / folder).mkdir(parents=True)
        (tree / "twice" / folder / "v_Diving_g01_c01.avi").touch()
    refused("ucf101", "v_Diving_g01_c01", tree / "twice", check="no")


def test_the_middles_of_equal_parts() -> None:
    assert (middles(10, 1), middles(1, 3), middles(90, 3)) == ([5], [0, 0, 0], [15, 45, 75])

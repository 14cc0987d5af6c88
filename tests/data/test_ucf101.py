from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clipcil.data.dataset import Dataset, open_dataset
from clipcil.data.video import VideoClip, middles, read_frames
from clipcil.errors import UserError
from support.made_up import picture, refused, shared_data, write_lines


def frames_tree(root: Path) -> Path:
    """Middle frames called like their clips, 10 groups of 2 clips for each class."""
    for number, name in enumerate(("YoYo", "HandStandPushups", "HammerThrow", "Hammering")):
        folder = {"HandStandPushups": "Handstand_Pushups"}.get(name, name)
        for group in range(1, 11):
            for clip in (1, 2):
                picture(
                    root / "frames" / folder / f"v_{name}_g{group:02}_c{clip:02}.jpg", number * 100 + group * 2 + clip
                )
    return root


def opened(root: Path, **options: object) -> Dataset:
    return open_dataset("ucf101", root, {"check": "no", **options})


def groups(data: Dataset, part: str) -> set[str]:
    pictures = getattr(data, part)
    return {Path(pictures.describe(i)).stem.split("_c")[0] for i in range(len(pictures))}


def test_folder_of_frames_and_the_fields_classes(tmp_path: Path) -> None:
    root = frames_tree(tmp_path)
    data = opened(root, split="random")
    assert data.classes == ["Hammering", "Hammer Throw", "Handstand Pushups"], "official order and spelling, no YoYo"
    assert (len(data.train), len(data.test)) == (48, 12)
    assert data.templates[0] == "a photo of a person {}."
    assert opened(root, split="random", classes="101").classes[-1] == "Yo Yo"
    assert data.train.image(0).size == (8, 8)


def test_groups_do_not_stand_on_both_sides(tmp_path: Path) -> None:
    root = frames_tree(tmp_path)
    data = opened(root, split="groups")
    assert len(data.test) == 12
    assert not groups(data, "train") & groups(data, "test")
    by_clip = opened(root, split="random")
    assert groups(by_clip, "train") & groups(by_clip, "test")


def test_official_lists(tmp_path: Path) -> None:
    root = frames_tree(tmp_path)
    with pytest.raises(UserError, match=r"list02\.txt"):
        opened(root, split="2")
    lists = tmp_path / "elsewhere"
    names = {"HammerThrow": "HammerThrow", "Hammering": "Hammering", "HandstandPushups": "HandStandPushups"}
    for part, numbers in (("train", range(3, 11)), ("test", range(1, 3))):
        lines = [f"{f}/v_{n}_g{g:02}_c{c:02}.avi" for f, n in names.items() for g in numbers for c in (1, 2)]
        write_lines(lists / f"{part}list02.txt", [line + " 7" * (part == "train") for line in lines])
    data = opened(root, split="2", lists=lists)
    assert (len(data.train), len(data.test)) == (48, 12)
    assert {name[-3:] for name in groups(data, "test")} == {"g01", "g02"}
    write_lines(lists / "testlist02.txt", ["nothing"])
    with pytest.raises(UserError, match="names none of the clips"):
        opened(root, split="2", lists=lists)


def test_folders_of_numbered_frames(tmp_path: Path) -> None:
    for clip in ("v_Diving_g01_c01", "v_Diving_g02_c01", "v_Archery_g01_c01", "v_Archery_g02_c01"):
        for number in range(1, 12):
            picture(tmp_path / clip / f"frame{number}.png", number, (number, 4))
    data = opened(tmp_path, split="groups", test_share=0.5)
    assert [Path(data.train.describe(i)).name for i in range(2)] == ["frame6.png", "frame6.png"]
    each = opened(tmp_path, split="groups", test_share=0.5, frames=3, pool="each")
    assert [Path(each.train.describe(i)).name for i in range(3)] == ["frame2.png", "frame6.png", "frame10.png"]
    assert each.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    mean = opened(tmp_path, split="groups", test_share=0.5, frames=3)
    with pytest.raises(UserError, match="differ in size"):
        mean.train.image(0)


def test_real_clips(own_cache: Path) -> None:
    pytest.importorskip("av")
    root = shared_data("ucf101-clips")
    data = opened(root, split="random")
    assert data.classes == ["Apply Eye Makeup", "Bench Press", "Diving"]
    assert (len(data.train), len(data.test)) == (12, 3)
    image = data.train.image(0)
    assert image.size == (320, 240)
    assert np.asarray(image).std() > 20
    kept = list((own_cache / "frames").rglob("*.jpg"))
    assert len(kept) == 1, "one clip was asked for, one was decoded"
    before = kept[0].stat().st_mtime_ns
    assert np.array_equal(np.asarray(data.train.image(0)), np.asarray(image))
    assert kept[0].stat().st_mtime_ns == before

    clip = VideoClip("x", "x", "01", (sorted(root.glob("*.avi"))[0],))
    frames = [np.asarray(frame, dtype=float) for frame in read_frames(clip, 3)]
    assert np.abs(frames[0] - frames[2]).mean() > 1, "different moments"
    mean = opened(root, split="random", frames=3)
    first = next(i for i in range(12) if "ApplyEyeMakeup_g01_c01" in mean.train.describe(i))
    np.testing.assert_allclose(np.asarray(mean.train.image(first), dtype=float), np.mean(frames, axis=0), atol=40)
    assert np.abs(np.asarray(mean.train.image(first), dtype=float) - np.mean(frames, axis=0)).mean() < 2
    each = opened(root, split="random", frames=2, pool="each")
    assert (len(each.train), len(each.test)) == (24, 6)


def test_damaged_clips_are_named(tmp_path: Path) -> None:
    pytest.importorskip("av")
    real = sorted(shared_data("ucf101-clips").glob("*.avi"))[0].read_bytes()
    for name, content in (("g01", b""), ("g02", b"not a video" * 50), ("g03", real[:3000])):
        path = tmp_path / f"v_Diving_{name}_c01.avi"
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"v_Diving_{name}_c01.avi is not a video"):
            read_frames(VideoClip("x", "x", "1", (path,)), 1)
    half = tmp_path / "v_Diving_g04_c01.avi"
    half.write_bytes(real[: len(real) // 2])
    assert read_frames(VideoClip("x", "x", "1", (half,)), 2)[1].size == (320, 240)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    refused("ucf101", "UCF-101", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refused("ucf101", "UCF-101", tmp_path)
    root = frames_tree(tmp_path)
    refused("ucf101", "4 classes and 80 clips", root)
    refused("ucf101", "'frames' is '0'", root, frames=0)
    for folder in ("a", "b"):
        (tmp_path / "twice" / folder).mkdir(parents=True)
        (tmp_path / "twice" / folder / "v_Diving_g01_c01.avi").touch()
    refused("ucf101", "v_Diving_g01_c01", tmp_path / "twice", check="no")


def test_middles() -> None:
    assert middles(10, 1) == [5]
    assert middles(1, 3) == [0, 0, 0]
    assert middles(90, 3) == [15, 45, 75]

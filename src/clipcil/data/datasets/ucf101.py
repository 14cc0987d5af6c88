"""`ucf101`: UCF-101, 13,320 clips of 101 human actions (Soomro et al. 2012), a picture for each clip."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field

from clipcil.data.dataset import Dataset, register
from clipcil.data.datasets.official import Official, TestShare
from clipcil.data.names import clean_name
from clipcil.data.pictures import PictureSet, identity_of_files
from clipcil.data.sources import SUFFIXES, list_files
from clipcil.data.tasks import split_by_group, split_whole
from clipcil.data.video import VIDEO, VideoClip, clip_pictures
from clipcil.errors import UserError
from clipcil.settings import options
from clipcil.storage import read_text

TEMPLATES = tuple(
    f"a {kind} of {article} person {verb}{{}}."
    for verb in ("", "using ", "doing ", "during ", "performing ", "practicing ")
    for article in ("a", "the")
    for kind in ("photo", "video", "example", "demonstration")
)
"""The 48 sentences that OpenAI published for UCF-101, which PROOF and ENGINE average over."""
OFFICIAL = Official(
    title="UCF-101",
    mark="*",
    archive="",
    advice="put the folder UCF-101 with its clips (or pictures called like them, v_ApplyEyeMakeup_g01_c01.jpg)",
    classes=101,
    pictures=13_320,
    unit="clips",
)
_CLIP = re.compile(r"v_([A-Za-z]+)_g(\d+)_c(\d+)")
_SPELLING = {"handstandpushups": "HandstandPushups"}
"""The clips of this class are called HandStandPushups; its folder and the class list spell it like this."""


@options
class UcfOptions:
    split: Literal["1", "2", "3", "random", "groups"] = "1"
    """1, 2, 3: the official lists trainlist01.txt and so on; random: 80/20 of the clips, as much of the field does
    (clips of one video are then in both parts, which favours every method); groups: 80/20 of the groups of such
    clips."""
    classes: Literal["100", "101"] = "100"
    """100: all but YoYo, so that ten tasks have the same size, as in the field; 101: all."""
    frames: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of frames taken from a clip: the middle frame, or the middle frames of as many equal parts."""
    pool: Literal["mean", "each"] = "mean"
    """With several frames. mean: one picture for a clip that averages them, so that accuracies still count clips; each:
    every frame is a separate picture."""
    lists: Path | None = None
    """Folder of the official lists; None: they are searched for below the data folder."""
    split_seed: int = 0
    """Seed of the splits random and groups."""
    test_share: TestShare = 0.2
    """Share of the test set in the splits random and groups."""
    check: bool = True
    """Refuse a dataset without the official 101 classes and 13,320 clips."""


@register(
    "ucf101",
    "UCF-101, 101 actions, 13,320 clips",
    "the clips (extra: video) or frames, and the official lists",
    UcfOptions,
)
def open_ucf101(root: Path | None, options: UcfOptions) -> Dataset:
    home = OFFICIAL.need(root or Path("data/ucf101"))
    clips = find_clips(home)
    names = sorted({clip.label for clip in clips}, key=str.lower)  # the order of the official class list
    if options.check:
        OFFICIAL.check(home, len(names), len(clips))
    if options.classes == "100":
        names = [name for name in names if name != "YoYo"]
        clips = [clip for clip in clips if clip.label != "YoYo"]
    labels = torch.tensor([names.index(clip.label) for clip in clips])
    if options.split == "random":
        is_test = split_whole([clip.name for clip in clips], options.test_share, options.split_seed)
    elif options.split == "groups":
        is_test = split_by_group([clip.group for clip in clips], labels, options.test_share, options.split_seed)
    else:
        is_test = _listed(clips, home, options, "test")
    is_train = _listed(clips, home, options, "train") if options.split in ("1", "2", "3") else ~is_test
    files = [file for clip in clips for file in clip.files]
    identity = identity_of_files(files, home) + f"-{options.frames}{options.pool}"
    pictures = clip_pictures(clips, options.frames, options.pool == "mean", identity)
    each = len(pictures) // max(1, len(clips))
    whole = PictureSet("ucf101", pictures, labels.repeat_interleave(each), identity)
    learn, check = (whole.subset(rows.repeat_interleave(each)) for rows in (is_train, is_test))
    return Dataset("ucf101", [clean_name(name, camel=True) for name in names], learn, check, TEMPLATES)


def find_clips(home: Path) -> list[VideoClip]:
    """Clips below `home` in order of name: videos, or else pictures whose file or folder is called like a clip."""
    found: dict[tuple[str, ...], list[Path]] = {}
    for suffixes in (VIDEO, SUFFIXES):
        for path in list_files(home, suffixes) if not found else ():
            if matches := _CLIP.findall(path.relative_to(home).as_posix()):
                found.setdefault(matches[-1], []).append(path)
    if not found:
        raise UserError(f"{home} has no clips of UCF-101: {OFFICIAL.advice} there")
    clips = []
    for (label, group, number), files in found.items():
        name = f"v_{label}_g{group}_c{number}"
        clip = VideoClip(name, _SPELLING.get(label.lower(), label), group, tuple(sorted(files, key=_natural)))
        if clip.is_video and len(files) > 1:
            raise UserError(f"clip {name} is there twice: {files[0]} and {files[1]}; remove one")
        clips.append(clip)
    return sorted(clips, key=lambda clip: clip.name.lower())


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts frame2 before frame10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", path.as_posix())]


def _listed(clips: list[VideoClip], home: Path, options: UcfOptions, part: str) -> torch.Tensor:
    """(N,) bool: the clips in the official list of this part."""
    name = f"{part}list0{options.split}.txt"
    paths = sorted((options.lists or home).glob(f"**/{name}"))
    if not paths:
        raise UserError(
            f"there is no {name} below {options.lists or home}: put the official folder ucfTrainTestlist there, name it"
            " with the data option lists=FOLDER, or choose split=random or split=groups"
        )
    # Lines are "ApplyEyeMakeup/v_ApplyEyeMakeup_g08_c01.avi 1"; the number at the end is not always there.
    listed = {match[0].lower() for match in _CLIP.finditer(read_text(paths[0], links=True))}
    rows = torch.tensor([clip.name.lower() in listed for clip in clips])
    if not bool(rows.any()):
        raise UserError(f"{paths[0]} names none of the clips in {home}")
    return rows

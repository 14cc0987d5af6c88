"""`ucf101`: UCF-101, 13,320 clips of 101 human actions (Soomro et al. 2012).

The picture of a clip is one of its frames, or the mean of several. Frames of videos are decoded once and kept on disk.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field

from clipcil.data.dataset import Dataset, register
from clipcil.data.datasets.official import OfficialOptions, check_counts, not_there
from clipcil.data.names import clean_name
from clipcil.data.pictures import LazyPictures, PictureSet, decode, identity_of_files
from clipcil.data.sources import SUFFIXES, list_files
from clipcil.data.tasks import split_by_group, split_whole
from clipcil.errors import UserError, first_line
from clipcil.settings import options
from clipcil.storage import cache_folder, read_text, whole_file

TITLE, NEEDS = "UCF-101", "the clips (extra: video) or frames, and the official lists"
TEMPLATES = tuple(
    f"a {kind} of {article} person {verb}{{}}."
    for verb in ("", "using ", "doing ", "during ", "performing ", "practicing ")
    for article in ("a", "the")
    for kind in ("photo", "video", "example", "demonstration")
)
"""The 48 sentences that OpenAI published for UCF-101, which PROOF and ENGINE average over."""
VIDEO = frozenset({".avi", ".mp4", ".mkv", ".webm", ".mov", ".m4v"})
JPEG_QUALITY = 95
"""JPEG quality of the frames kept on disk: half a gigabyte for all of UCF-101, where PNG would take two."""
_CLIP = re.compile(r"v_([A-Za-z]+)_g(\d+)_c(\d+)")
_SPELLING = {"handstandpushups": "HandstandPushups"}
"""The clips of this class are called HandStandPushups; its folder and the class list spell it like this."""


@options
class UcfOptions(OfficialOptions):
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


@register("ucf101", "UCF-101, 101 actions, 13,320 clips", NEEDS, UcfOptions)
def open_ucf101(root: Path | None, options: UcfOptions) -> Dataset:
    home = root or Path("data/ucf101")
    clips = find_clips(home)
    names = sorted({clip.label for clip in clips}, key=str.lower)  # the order of the official class list
    if options.check:
        check_counts(home, TITLE, (len(names), len(clips)), (101, 13_320), "clips")
    if options.classes == "100":
        names = [name for name in names if name != "YoYo"]
        clips = [clip for clip in clips if clip.label != "YoYo"]
    labels = torch.tensor([names.index(clip.label) for clip in clips])
    if options.split == "random":
        is_test = split_whole([clip.name for clip in clips], options.test_share, options.split_seed)
        is_train = ~is_test
    elif options.split == "groups":
        is_test = split_by_group([clip.group for clip in clips], labels, options.test_share, options.split_seed)
        is_train = ~is_test
    else:
        lists = options.lists or home
        is_train, is_test = (_listed(clips, lists, f"{part}list0{options.split}.txt") for part in ("train", "test"))
    files = [file for clip in clips for file in clip.files]
    identity = identity_of_files(files, home) + f"-{options.frames}{options.pool}"
    folder, each = cache_folder() / "frames" / identity, options.frames if options.pool == "each" else 1
    pictures = LazyPictures(
        len(clips) * each, lambda place: _picture(clips[place // each], place % each, options, folder)
    )
    whole = PictureSet("ucf101", pictures, labels.repeat_interleave(each), identity)
    learn, check = (whole.subset(rows.repeat_interleave(each)) for rows in (is_train, is_test))
    return Dataset("ucf101", [clean_name(name, camel=True) for name in names], learn, check, TEMPLATES)


@dataclass(frozen=True)
class VideoClip:
    """One clip: a video file, or the pictures of its frames in order."""

    name: str
    label: str
    group: str
    files: tuple[Path, ...]

    @property
    def is_video(self) -> bool:
        return self.files[0].suffix.lower() in VIDEO


def find_clips(home: Path) -> list[VideoClip]:
    """Clips below `home` in order of name: videos, or else pictures whose file or folder is called like a clip."""
    found: dict[tuple[str, ...], list[Path]] = {}
    for suffixes in (VIDEO, SUFFIXES):
        for path in list_files(home, suffixes) if home.is_dir() and not found else ():
            if matches := _CLIP.findall(path.relative_to(home).as_posix()):
                found.setdefault(matches[-1], []).append(path)
    if not found:
        raise not_there(home, TITLE, "the clips, or frames named like them (v_ApplyEyeMakeup_g01_c01.jpg),")
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


def _listed(clips: list[VideoClip], folder: Path, name: str) -> torch.Tensor:
    """(N,) bool: the clips in the official list `name`, which is somewhere below `folder`."""
    paths = sorted(folder.glob(f"**/{name}"))
    if not paths:
        raise UserError(
            f"there is no {name} below {folder}: put the official folder ucfTrainTestlist there, name it with the data"
            " option lists=FOLDER, or choose split=random or split=groups"
        )
    # Lines are "ApplyEyeMakeup/v_ApplyEyeMakeup_g08_c01.avi 1"; the number at the end is not always there.
    listed = {match[0].lower() for match in _CLIP.finditer(read_text(paths[0], links=True))}
    rows = torch.tensor([clip.name.lower() in listed for clip in clips])
    if not bool(rows.any()):
        raise UserError(f"{paths[0]} names none of the clips")
    return rows


def _picture(clip: VideoClip, which: int, options: UcfOptions, folder: Path) -> Path:
    """One of the frames of a clip, or the picture that averages them; made when it is asked for the first time."""
    mean = options.pool == "mean"
    if not clip.is_video and not (mean and options.frames > 1):
        return clip.files[middles(len(clip.files), options.frames)[which]]
    mark = hashlib.sha256(str(clip.files[0]).encode("utf-8", "surrogateescape")).hexdigest()[:8]
    path = folder / f"{clip.name}-{mark}-{which}.jpg"
    if not path.is_file():
        found = read_frames(clip, options.frames)
        for number, frame in enumerate([average(clip, found)] if mean else found):
            with whole_file(folder / f"{clip.name}-{mark}-{number}.jpg") as part:
                frame.save(part, format="JPEG", quality=JPEG_QUALITY, subsampling=0)
    return path


def middles(total: int, count: int) -> list[int]:
    """Places of `count` frames among `total`: the middles of `count` equal parts (one: the middle frame)."""
    return [min(total - 1, int((2 * part + 1) * total / (2 * count))) for part in range(count)]


def average(clip: VideoClip, frames: Sequence[Image.Image]) -> Image.Image:
    if len({frame.size for frame in frames}) > 1:
        raise UserError(f"the frames of clip {clip.name} differ in size and cannot be averaged")
    total = np.mean([np.asarray(frame, dtype=np.float32) for frame in frames], axis=0)
    return Image.fromarray(total.round().astype(np.uint8))


def read_frames(clip: VideoClip, count: int) -> list[Image.Image]:
    """The `count` frames at `middles`, RGB; the last frame replaces those lost in a damaged end."""
    if not clip.is_video:
        return [decode(clip.files[place], str(clip.files[place])) for place in middles(len(clip.files), count)]
    path = clip.files[0]
    try:
        import av
        import av.logging
    except ImportError as error:
        raise UserError(f"reading {path.name} needs PyAV; install it with: pip install 'clipcil[video]'") from error
    av.logging.set_level(av.logging.PANIC)  # else every damaged file writes to the terminal by itself
    try:
        # What a file says about its length can be wrong; counting its packets decodes nothing.
        with av.open(str(path)) as container:
            total = sum(1 for packet in container.demux(video=0) if packet.size)
        wanted = middles(max(total, 1), count)
        found: dict[int, Image.Image] = {}
        with av.open(str(path)) as container:
            frame = None
            for place, frame in enumerate(islice(container.decode(video=0), wanted[-1] + 1)):
                if place in wanted:
                    found[place] = frame.to_image()
            if frame is None:
                raise ValueError("it holds no frames")
            last = frame.to_image()
    except Exception as error:  # PyAV has a class for each way a file can be damaged
        message = f"{path} is not a video that can be read ({first_line(error)}); replace or remove it"
        raise UserError(message) from error
    return [found.get(place, last) for place in wanted]

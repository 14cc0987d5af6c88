"""Clips as pictures: chosen frames of a video, taken out once and kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from clipcil.data.pictures import LazyPictures, decode
from clipcil.errors import UserError, first_line
from clipcil.storage import cache_folder, whole_file

VIDEO = frozenset({".avi", ".mp4", ".mkv", ".webm", ".mov", ".m4v"})
QUALITY = 95
"""JPEG quality of the frames kept on disk: half a gigabyte for all of UCF-101, where PNG would take two."""


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


def clip_pictures(clips: Sequence[VideoClip], frames: int, mean: bool, identity: str) -> LazyPictures:
    """For each clip `frames` frames one by one or, with `mean`, one picture that averages them.

    A video is decoded when its picture is asked for the first time; after that the picture comes from the cache.
    """
    folder, each = cache_folder() / "frames" / identity, 1 if mean else frames

    def make(place: int) -> Path:
        clip, which = clips[place // each], place % each
        if not clip.is_video and not (mean and frames > 1):
            return clip.files[middles(len(clip.files), frames)[which]]
        mark = hashlib.sha256(str(clip.files[0]).encode("utf-8", "surrogateescape")).hexdigest()[:8]
        paths = [folder / f"{clip.name}-{mark}-{number}.jpg" for number in range(each)]
        if not paths[which].is_file():
            found = read_frames(clip, frames)
            for path, frame in zip(paths, [average(clip, found)] if mean else found, strict=True):
                with whole_file(path) as part:
                    frame.save(part, format="JPEG", quality=QUALITY, subsampling=0)
        return paths[which]

    return LazyPictures(len(clips) * each, make)


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
    av = _library(path)
    try:
        # What a file says about its length can be wrong; counting its packets decodes nothing.
        with av.open(str(path)) as container:
            total = sum(1 for packet in container.demux(video=0) if packet.size)
        wanted = middles(max(total, 1), count)
        found: dict[int, Image.Image] = {}
        with av.open(str(path)) as container:
            frame = None
            for place, frame in enumerate(container.decode(video=0)):
                if place in wanted:
                    found[place] = frame.to_image()
                if place >= wanted[-1]:
                    break
            if frame is None:
                raise ValueError("it holds no frames")
            last = frame.to_image()
    except Exception as error:  # PyAV has a class for each way a file can be damaged
        message = f"{path} is not a video that can be read ({first_line(error)}); replace or remove it"
        raise UserError(message) from error
    return [found.get(place, last) for place in wanted]


def _library(path: Path) -> Any:
    try:
        import av
        import av.logging
    except ImportError as error:
        raise UserError(f"reading {path.name} needs PyAV; install it with: pip install 'clipcil[video]'") from error
    av.logging.set_level(av.logging.PANIC)  # else every damaged file writes to the terminal by itself
    return av

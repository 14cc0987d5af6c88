"""Clips as pictures: chosen frames of a video, taken out once and kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from PIL import Image

from clipcil.data.pictures import Picture, decode
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


class ClipPictures(Sequence[Picture]):
    """The pictures of clips: for each clip, `frames` frames one by one, or (`mean`) one picture that averages them.

    A video is decoded when its picture is asked for the first time; after that the picture comes from the cache.
    """

    def __init__(self, clips: Sequence[VideoClip], frames: int, mean: bool, identity: str) -> None:
        self.clips, self.frames, self.mean = clips, frames, mean
        self.folder = cache_folder() / "frames" / identity

    @property
    def each(self) -> int:
        """Pictures per clip."""
        return 1 if self.mean else self.frames

    def __len__(self) -> int:
        return len(self.clips) * self.each

    @overload
    def __getitem__(self, index: int) -> Picture: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Picture]: ...
    def __getitem__(self, index: int | slice) -> Picture | Sequence[Picture]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        clip, which = self.clips[index // self.each], index % self.each
        if clip.files[0].suffix.lower() not in VIDEO and not (self.mean and self.frames > 1):
            return clip.files[middles(len(clip.files), self.frames)[which]]
        mark = hashlib.sha256(str(clip.files[0]).encode("utf-8", "surrogateescape")).hexdigest()[:8]
        path = self.folder / f"{clip.name}-{mark}-{which}.jpg"
        if not path.is_file():
            self._make(clip, path)
        return path

    def _make(self, clip: VideoClip, path: Path) -> None:
        frames = read_frames(clip, self.frames)
        if self.mean:
            frames = [average(clip, frames)]
        for number, frame in enumerate(frames):
            with whole_file(path.with_name(f"{path.stem.rpartition('-')[0]}-{number}.jpg")) as part:
                frame.save(part, format="JPEG", quality=QUALITY, subsampling=0)


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
    if clip.files[0].suffix.lower() not in VIDEO:
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

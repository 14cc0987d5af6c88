"""S9: a first lesson of 25 pictures of 5 classes with Strata and a ViT-B/32: CPU seconds beyond encoding."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Row
from benchmarks.p8_flagship import write_pictures
from benchmarks.shapes import SMALL_TEXT, SMALL_VISION, random_clip
from clipcil.classifier.classifier import Classifier
from clipcil.clip.config import TextConfig, VisionConfig

MOST = 10.0
"""CPU seconds that may be spent beyond encoding."""


def run(quick: bool) -> list[Row]:
    shape = (SMALL_VISION, SMALL_TEXT) if quick else (VisionConfig(patch_size=32), TextConfig(vocab=8192))
    clip, spent = random_clip(*shape), [0.0]
    for tower in (clip.vision, clip.text):
        tower.forward = timed(tower.forward, spent)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(Path(folder), classes=5, count=5)
        model, start = Classifier("strata", backbone=clip), time.process_time()
        model.learn(Path(folder) / "train")
        total = time.process_time() - start
    beyond = total - spent[0]
    step = "lesson of 25 pictures, 5 classes, Strata, B/32"
    return [Row("S9", step, "", f"{total:.1f} s", f"{beyond:.1f} s beyond encoding", f"≤{MOST:g} s", beyond <= MOST)]


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """The function; the CPU seconds of its calls are added to `spent`."""

    def call(*args: Any, **options: Any) -> Any:
        start = time.process_time()
        with torch.no_grad():
            result = function(*args, **options)
        spent[0] += time.process_time() - start
        return result

    return call

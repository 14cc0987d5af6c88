"""P5: how much of this machine's arithmetic stage 1 uses.

The floating-point operations of one forward and backward pass of the vision tower are counted by torch's own counter
(matrix products alone), divided by the seconds they take, and set against the rate of a plain 2048³ float32 product on
the same threads, measured in turn with it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import Row, alternate, duration
from benchmarks.shapes import B16_VISION, SMALL_TEXT, random_clip
from clipcil.clip import CLIP, load_clip
from clipcil.training.losses import clip_loss


class Stage1:
    """One pass of stage 1 over a batch: the loss of Eq. (1) and the gradients of the whole tower."""

    def __init__(self, clip: CLIP, batch: int, classes: int = 10) -> None:
        torch.manual_seed(0)
        self.tower = clip.vision.requires_grad_(True)
        self.pixels = torch.randn(batch, *clip.preprocess.shape)
        self.texts = normalize(torch.randn(classes, clip.config.dim), dim=-1)
        self.labels = torch.randint(classes, (batch,))
        self.scale = clip.scale.detach()

    def __call__(self) -> Tensor:
        for parameter in self.tower.parameters():
            parameter.grad = None
        features = normalize(self.tower(self.pixels, class_only=True).features, dim=-1)
        loss = clip_loss(self.scale * features @ self.texts.T, self.labels)
        torch.autograd.backward(loss)
        return loss.detach()

    def operations(self) -> int:
        with FlopCounterMode(display=False) as counter:
            self()
        return int(counter.get_total_flops())


def run(quick: bool) -> list[Row]:
    side = 512 if quick else 2048
    left, right = torch.randn(side, side), torch.randn(side, side)
    rows = []
    for name, clip, batch, repeats in (
        ("B/16-shaped tower", None if quick else random_clip(B16_VISION, SMALL_TEXT), 16, 2),
        ("embedded tower", load_clip("mini"), 32, 5 if quick else 60),
    ):
        if clip is None:
            continue
        step = Stage1(clip, batch)
        seconds = alternate({"product": lambda: left @ right, "step": step}, repeats)
        top = 2 * side**3 / seconds["product"]
        rate = step.operations() / seconds["step"]
        rows.append(
            Row(
                "P5",
                f"stage 1, {name}, batch {batch}",
                f"{top / 1e9:.0f} GFLOP/s (product)",
                f"{rate / 1e9:.0f} GFLOP/s",
                f"{100 * rate / top:.0f} %",
                "≥60 %",
                rate >= 0.6 * top,
                note=f"one pass takes {duration(seconds['step'])}",
                details={"operations": step.operations(), "seconds": seconds},
            )
        )
    return rows

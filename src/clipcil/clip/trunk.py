"""The frozen trunk of the embedded backbone: an EfficientNet-Lite, batch norm folded into the kernels.

    stem: 3×3 convolution, stride 2, ReLU6
    block: [1×1 expand, ReLU6] → k×k depthwise, ReLU6 → 1×1 project [+ input]
    head: 1×1 convolution, ReLU6 (the last layer before EfficientNet's pooling and classifier)
    reduce: 1×1 convolution without activation, the principal axes of the head's output

`trunk.json` holds the list of blocks and may leave out head and reduce; padding is TensorFlow's "same": ⌈n/stride⌉
outputs, the odd pixel at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_AT_ONCE = 16


class Convolution(nn.Module):
    """One convolution with TensorFlow's padding and, where asked for, ReLU6."""

    def __init__(self, into: int, out: int, kernel: int, stride: int = 1, depthwise: bool = False, relu: bool = True):
        super().__init__()
        self.stride, self.relu = stride, relu
        self.groups = into if depthwise else 1
        self.weight = nn.Parameter(torch.zeros(out, into // self.groups, kernel, kernel), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(out), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        kernel, padding = self.weight.shape[-1], 0
        if self.stride == 1:
            padding = kernel // 2
        else:
            down, right = (_total_padding(size, kernel, self.stride) for size in x.shape[-2:])
            x = F.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))
        x = F.conv2d(x, self.weight, self.bias, self.stride, padding, groups=self.groups)
        return F.hardtanh_(x, 0.0, 6.0) if self.relu else x


def _total_padding(size: int, kernel: int, stride: int) -> int:
    return max((-(-size // stride) - 1) * stride + kernel - size, 0)


class MobileBlock(nn.Module):
    def __init__(self, into: int, out: int, kernel: int, stride: int, expand: int, skip: bool) -> None:
        super().__init__()
        inner = into * expand
        self.skip = skip
        self.expand = Convolution(into, inner, 1) if expand > 1 else nn.Identity()
        self.depthwise = Convolution(inner, inner, kernel, stride, depthwise=True)
        self.project = Convolution(inner, out, 1, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(self.depthwise(self.expand(x)))
        return out.add_(x) if self.skip else out


class Trunk(nn.Module):
    """(B, 3, 128, 128) normalised pixels → (B, channels, 4, 4)."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__()
        width = spec["stem"]["out"]
        self.stem = Convolution(3, width, spec["stem"]["kernel"], spec["stem"]["stride"])
        blocks = []
        for block in spec["blocks"]:
            expand = 6 if block["expand"] else 1  # EfficientNet-Lite widens by 6 wherever it widens
            blocks.append(MobileBlock(width, block["out"], block["kernel"], block["stride"], expand, block["skip"]))
            width = block["out"]
        self.blocks = nn.Sequential(*blocks)
        self.head: nn.Module = nn.Identity()
        self.reduce: nn.Module = nn.Identity()
        if "head" in spec:
            self.head = Convolution(width, spec["head"]["out"], 1)
            width = spec["head"]["out"]
        if "reduce" in spec:
            self.reduce = Convolution(width, spec["reduce"]["out"], 1, relu=False)

    @torch.no_grad()
    def forward(self, pixels: Tensor) -> Tensor:
        # Channels last is twice as fast in the CPU's depthwise kernels, and a few pictures at a time stay in its cache.
        parts = []
        for start in range(0, max(len(pixels), 1), _AT_ONCE):
            part = pixels[start : start + _AT_ONCE].contiguous(memory_format=torch.channels_last)
            parts.append(self.whole(part).contiguous())
        return torch.cat(parts)

    def whole(self, pixels: Tensor) -> Tensor:
        """The same in one piece, as a graph that is exported needs it."""
        out: Tensor = self.reduce(self.head(self.blocks(self.stem(pixels))))
        return out

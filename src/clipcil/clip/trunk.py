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
INNER_STAGES = 4
"""Chosen on held-out training pictures (docs/beyond.md): two are 2 points worse on emoji and 1 on CIFAR-100 and CUB."""


KERNELS, STRIDES = range(1, 16, 2), range(1, 9)
"""What a convolution may have; the padding of even kernels would be another."""


class Convolution(nn.Module):
    """One convolution with TensorFlow's padding and, where asked for, ReLU6."""

    def __init__(self, into: int, out: int, kernel: int, stride: int = 1, depthwise: bool = False, relu: bool = True):
        super().__init__()
        if {type(kernel), type(stride)} != {int} or kernel not in KERNELS or stride not in STRIDES:
            raise ValueError(f"a convolution with kernel {kernel!r} and stride {stride!r}")
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

        widths = [block["out"] for block in spec["blocks"]]
        ends = [depth for depth, width in enumerate(widths) if widths[depth + 1 : depth + 2] != [width]]
        self.depths = ends[-INNER_STAGES:]
        """The last block of each of the last stages, blocks of equal width: what `inner` averages."""
        self.inner_sizes = tuple(widths[depth] for depth in self.depths)

    @torch.no_grad()
    def forward(self, pixels: Tensor, inner: bool = False) -> Tensor:
        """With `inner`, some channels more that hold averages over places of blocks further down, `inner_sizes` of
        each, packed as they come, and zeros to fill the last channel."""
        # Channels last is twice as fast in the CPU's depthwise kernels, and a few pictures at a time stay in its cache.
        parts = []
        for start in range(0, max(len(pixels), 1), _AT_ONCE):
            part = pixels[start : start + _AT_ONCE].contiguous(memory_format=torch.channels_last)
            parts.append((self.whole(part) if inner else self.maps(part)[0]).contiguous())
        return torch.cat(parts)

    def whole(self, pixels: Tensor) -> Tensor:
        """(B, 3, h, w) → (B, channels + packed, high, wide) in one piece, as a graph that is exported needs it."""
        maps, averages = self.maps(pixels)
        places = maps.shape[2] * maps.shape[3]
        packed = F.pad(averages, (0, -averages.shape[1] % places))
        return torch.cat([maps, packed.reshape(maps.shape[0], -1, *maps.shape[2:])], dim=1)

    def maps(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, h, w) → what the tower reads (B, channels, high, wide), and the averages (B, sum of inner_sizes)."""
        hidden: Tensor = self.stem(pixels)
        averages: list[Tensor] = []
        for depth, block in enumerate(self.blocks):
            hidden = block(hidden)
            if depth in self.depths:
                averages.append(hidden.mean((2, 3)))
        return self.reduce(self.head(hidden)), torch.cat([hidden.new_zeros(hidden.shape[0], 0), *averages], dim=1)

    def side(self, pixels: int) -> int:
        """How many places the output has along one side, for a picture of as many pixels along it."""
        for module in self.modules():
            if isinstance(module, Convolution):
                pixels = -(-pixels // module.stride)
        return pixels

    def packed(self, high: int, wide: int) -> int:
        """How many channels of high × wide the averages take."""
        numbers: int = sum(self.inner_sizes)
        return -(-numbers // (high * wide))

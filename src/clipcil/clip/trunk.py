"""The trunk of the embedded backbone: an EfficientNet-Lite, with batch norm folded into the kernels.

    stem: 3×3 convolution, stride 2, ReLU6
    block: [1×1 expand, ReLU6] → k×k depthwise, ReLU6 → 1×1 project [+ input]
    head: 1×1 convolution, ReLU6 (the last layer before EfficientNet's pooling and classifier)
    reduce: 1×1 convolution without activation, the principal axes of the head's output

`trunk.json` holds the shapes; head and reduce are optional. Padding is TensorFlow's "same": ⌈n/stride⌉ outputs, the odd
pixel at the end.

The first part, up to the last block that halves the picture, is frozen, and its output is cached. The second part
begins the vision tower, which a method may tune.
"""

import copy
from collections.abc import Mapping
from itertools import product
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from clipcil.clip.config import Size
from clipcil.settings import typed

PASS = 16
"""Pictures per pass; more would not stay in the cache of a CPU."""
INNER_STAGES = 4
"""Chosen on held-out training pictures (docs/beyond.md): two are 2 points worse on emoji and 1 on CIFAR-100 and CUB."""
EXPANSION = 6
"""EfficientNet-Lite widens its blocks by this factor, except those of the first stage."""


@dataclass(frozen=True)
class LayerShape:
    """A convolution, or a block around one. Kernels are odd: an even one would need other padding."""

    out: Size
    kernel: Literal[1, 3, 5, 7, 9, 11, 13, 15] = 1
    stride: Annotated[int, Field(ge=1, le=8)] = 1
    expand: bool = False
    skip: bool = False


@dataclass(frozen=True)
class TrunkShape:
    """The part of `trunk.json` that describes the layers."""

    stem: LayerShape
    blocks: tuple[LayerShape, ...]
    head: LayerShape | None = None
    reduce: LayerShape | None = None


class Convolution(nn.Module):
    """One convolution with TensorFlow's padding and, where asked for, ReLU6."""

    def __init__(self, into: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, relu: bool = True):
        super().__init__()
        self.stride, self.groups, self.relu = stride, groups, relu
        self.weight = nn.Parameter(torch.zeros(out, into // groups, kernel, kernel), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(out), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        kernel, padding = self.weight.shape[-1], 0
        if self.stride == 1:
            padding = kernel // 2
        else:
            steps = ((size, -(-size // self.stride) - 1) for size in x.shape[-2:])
            down, right = (max(step * self.stride + kernel - size, 0) for size, step in steps)
            x = F.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))
        depthwise = (self.stride, self.groups) == (1, len(self.weight)) and kernel > 3
        if depthwise and self.weight.requires_grad and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
            x = Depthwise.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        else:
            x = F.conv2d(x, self.weight, self.bias, self.stride, padding, groups=self.groups)
        return F.hardtanh_(x, 0.0, 6.0) if self.relu else x


class Depthwise(torch.autograd.Function):
    """A depthwise convolution of stride 1 whose backward pass takes a fifth of torch's time with 5×5 kernels on a CPU.

    The gradient of a weight is the product of the shifted input and the gradient, summed over pictures and places.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2, groups=len(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        kernel, (high, wide) = weight.shape[-1], x.shape[2:]
        of_x = F.conv2d(gradient, weight.flip(2, 3), padding=kernel // 2, groups=len(weight))
        inputs, outputs = x.permute(0, 2, 3, 1), gradient.permute(0, 2, 3, 1)  # (B, h, w, C), as they are in memory
        of_weight = torch.zeros_like(weight)
        for row, column in product(range(kernel), repeat=2):
            down, right = row - kernel // 2, column - kernel // 2  # an output reads the input so far from its place
            if abs(down) < high and abs(right) < wide:
                read = inputs[:, max(down, 0) : high + min(down, 0), max(right, 0) : wide + min(right, 0)]
                made = outputs[:, max(-down, 0) : high - max(down, 0), max(-right, 0) : wide - max(right, 0)]
                of_weight[:, 0, row, column] = (read * made).sum((0, 1, 2))
        return of_x, of_weight, gradient.sum((0, 2, 3))


class MobileBlock(nn.Module):
    def __init__(self, into: int, shape: LayerShape) -> None:
        super().__init__()
        inner = into * EXPANSION if shape.expand else into
        self.skip = shape.skip
        self.expand = Convolution(into, inner) if shape.expand else nn.Identity()
        self.depthwise = Convolution(inner, inner, shape.kernel, shape.stride, groups=inner)
        self.project = Convolution(inner, shape.out, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(self.depthwise(self.expand(x)))
        return out.add_(x) if self.skip else out


class Trunk(nn.Module):
    """A trunk or a part of it: (B, 3, 128, 128) normalised pixels, or what the part before made → (B, channels, 4, 4).

    Behind its own channels an output holds the averages of inner blocks one after the other, and zeros to fill the last
    channel.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """`spec` is the content of a `trunk.json`."""
        super().__init__()
        shape: TrunkShape = typed(spec, TrunkShape)
        widths = [block.out for block in shape.blocks]
        self.stem: nn.Module = Convolution(3, shape.stem.out, shape.stem.kernel, shape.stem.stride)
        self.blocks = nn.Sequential(*map(MobileBlock, [shape.stem.out, *widths], shape.blocks))
        self.into, self.widths = 3, [shape.stem.out, *widths]
        self.channels = self.widths[-1]
        self.head: nn.Module = nn.Identity()
        self.reduce: nn.Module = nn.Identity()
        if shape.head is not None:
            self.head, self.channels = Convolution(self.channels, shape.head.out), shape.head.out
        if shape.reduce is not None:
            self.reduce, self.channels = Convolution(self.channels, shape.reduce.out, relu=False), shape.reduce.out
        ends = [depth for depth, width in enumerate(widths) if widths[depth + 1 : depth + 2] != [width]]
        self.depths = ends[-INNER_STAGES:]
        """The last block of each of the last stages (blocks of equal width), whose outputs are averaged."""
        self.inner_sizes = tuple(widths[depth] for depth in self.depths)
        halving = [depth for depth, block in enumerate(shape.blocks) if block.stride > 1]
        self.cut = halving[-1] if halving else len(widths)
        """Number of blocks of the first part."""
        self.packed = 0
        """Number of averages in the input."""

    def parts(self) -> tuple["Trunk", "Trunk"]:
        """Both parts, with these weights: `second(first(pixels))` is what this trunk makes of pixels."""
        first, second = copy.copy(self), copy.copy(self)
        for part in (first, second):
            part._modules = dict(self._modules)
        first.blocks, second.blocks = self.blocks[: self.cut], self.blocks[self.cut :]  # type: ignore[assignment]
        first.head = first.reduce = second.stem = nn.Identity()
        first.channels = second.into = self.widths[self.cut]
        first.inner_sizes = self.inner_sizes[: sum(depth < self.cut for depth in self.depths)]
        second.packed = sum(first.inner_sizes)
        return first, second

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, 3 or channels of the part before, h, w) → (B, channels + packed, high, wide)."""
        averages: list[Tensor] = [pixels[:, self.into :].flatten(1)[:, : self.packed]]
        # Channels last is twice as fast in the CPU's depthwise kernels.
        hidden: Tensor = self.stem(pixels[:, : self.into].contiguous(memory_format=torch.channels_last))
        for depth, block in self.blocks.named_children():
            hidden = block(hidden)
            if int(depth) in self.depths:
                averages.append(hidden.mean((2, 3)))
        maps: Tensor = self.reduce(self.head(hidden))
        packed = torch.cat(averages, dim=1)
        packed = F.pad(packed, (0, -packed.shape[1] % (maps.shape[2] * maps.shape[3])))
        return torch.cat([maps, packed.reshape(maps.shape[0], -1, *maps.shape[2:])], dim=1)

    def output_shape(self, pixels: int) -> tuple[int, int, int]:
        """(channels + packed, high, wide) of the output, for pictures of `pixels` along each side."""
        side = pixels
        for module in self.modules():
            if isinstance(module, Convolution):
                side = -(-side // module.stride)
        packed = -(-sum(self.inner_sizes) // side**2)
        return self.channels + packed, side, side

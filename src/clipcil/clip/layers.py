"""Layers of both towers: attention with key/value prefixes, MLP, block. Parameter names are Hugging Face's."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipcil.clip.config import TowerConfig

CPUINFO = Path("/proc/cpuinfo")

Prefix = tuple[Tensor, Tensor]
"""Keys and values, each (B or 1, L, width), that a layer puts in front of its own."""


def quick_gelu(hidden: Tensor) -> Tensor:
    """x·σ(1.702 x), OpenAI's activation, as silu(1.702 x)/1.702: silu keeps one tensor for backward, not two."""
    return F.silu(1.702 * hidden) / 1.702


@cache
def blas_is_slow() -> bool:
    """Whether oneDNN multiplies matrices in single precision twice as fast as torch's BLAS on this processor.

    MKL, the BLAS of torch, uses AVX-512 instructions at half speed on processors of AMD; oneDNN comes with torch too.
    This is a fact about the processor and not a measurement, so that a run resumes to the same bits on a busy machine.
    """
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":  # type: ignore[no-untyped-call]
        return False
    return CPUINFO.is_file() and "AuthenticAMD" in CPUINFO.read_text()


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden (…, in) · weightᵀ (in, out) + bias (out,), by the faster library (see `blas_is_slow`)."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or not blas_is_slow():
        return F.linear(hidden, weight, bias)  # an export has to run everywhere
    tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
    if not hidden.numel() or any(each.dtype != torch.float32 or each.device.type != "cpu" for each in tensors):
        return F.linear(hidden, weight, bias)
    result: Tensor = OneDNNLinear.apply(hidden, weight, bias)  # type: ignore[no-untyped-call]
    return result


def onednn_product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left (…, k) · rightᵀ (k, n) + bias (n,) in single precision; neither has to be contiguous."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return product


class OneDNNLinear(torch.autograd.Function):
    """A linear layer whose three products (forward, and the gradients of input and weight) are oneDNN's."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return onednn_product(hidden, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        rows, inputs = gradient.reshape(-1, gradient.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
        of_hidden = onednn_product(gradient, weight.T) if ctx.needs_input_grad[0] else None
        of_weight = onednn_product(rows.T, inputs.T) if ctx.needs_input_grad[1] else None
        return of_hidden, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


class Linear(nn.Linear):
    """`nn.Linear` by `linear`."""

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weight, self.bias)


def embedding(count: int, width: int) -> nn.Embedding:
    """A table of zeros: weights come from a file, and drawing random ones first would take longer than loading."""
    table: nn.Embedding = nn.Embedding.from_pretrained(torch.zeros(count, width), freeze=False)  # type: ignore[no-untyped-call]
    return table


class Attention(nn.Module):
    """softmax(Q Kᵀ/√d_h) V per head; q, k, v, out projections with bias."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.k_proj = Linear(width, width)
        self.v_proj = Linear(width, width)
        self.q_proj = Linear(width, width)
        self.out_proj = Linear(width, width)

    def forward(self, queries: Tensor, context: Tensor, prefix: Prefix | None, causal: bool = False) -> Tensor:
        """Queries from (B, Q, width), keys and values from (B, T, width) → (B, Q, width).

        `prefix` goes in front of the keys and values after their projections; `causal` is for Q = T without prefix.
        """
        keys, values = self.k_proj(context), self.v_proj(context)
        if prefix is not None:
            batch = keys.shape[0]
            keys = torch.cat([prefix[0].expand(batch, -1, -1), keys], dim=1)
            values = torch.cat([prefix[1].expand(batch, -1, -1), values], dim=1)
        return self.out_proj(self.mix(self.q_proj(queries), keys, values, causal))

    def mix(
        self, queries: Tensor, keys: Tensor, values: Tensor, causal: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """Attention of projected queries (B, Q, width), keys and values (B, T, width) → (B, Q, width).

        `mask` is broadcast to (B, heads, Q, T); True: may attend. Mixed precision leaves it in single precision on a
        CPU, whose backward pass in bfloat16 takes many times as long.
        """
        if queries.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return self.mix(queries.float(), keys.float(), values.float(), causal, mask)
        mixed = F.scaled_dot_product_attention(
            self._split(queries), self._split(keys), self._split(values), attn_mask=mask, is_causal=causal
        )  # (B, heads, Q, width / heads)
        return mixed.transpose(1, 2).flatten(2)

    def _split(self, hidden: Tensor) -> Tensor:
        """(B, T, width) → (B, heads, T, width / heads), a view."""
        batch, length, width = hidden.shape
        return hidden.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.fc1 = Linear(config.width, config.mlp)
        self.fc2 = Linear(config.mlp, config.width)
        self.activation = quick_gelu if config.activation == "quick_gelu" else F.gelu

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(hidden)))


class Block(nn.Module):
    """x ← x + Attention(LN x);  x ← x + MLP(LN x)."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config.width, config.heads)
        self.layer_norm1 = nn.LayerNorm(config.width, eps=config.eps)
        self.mlp = MLP(config)
        self.layer_norm2 = nn.LayerNorm(config.width, eps=config.eps)

    def forward(self, hidden: Tensor, prefix: Prefix | None = None, causal: bool = False) -> Tensor:
        """(B, T, width) → (B, T, width)."""
        normed = self.layer_norm1(hidden)
        hidden = hidden + self.self_attn(normed, normed, prefix, causal)
        return hidden + self.mlp(self.layer_norm2(hidden))

    def at(self, hidden: Tensor, position: int, prefix: Prefix | None = None) -> Tensor:
        """The block's output at one position: (B, T, width) → (B, width). Exact.

        The queries, the output projection and the MLP of other tokens are not computed: after the last block of a tower
        only this position is read.
        """
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        normed = self.layer_norm1(hidden)
        mixed = self.self_attn(normed[rows, position].unsqueeze(1), normed, prefix)
        chosen = hidden[rows, position] + mixed.squeeze(1)
        return chosen + self.mlp(self.layer_norm2(chosen))


class Encoder(nn.Module):
    """The stack of blocks; a module of its own because Hugging Face names it so (`encoder.layers.<i>`)."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))

    def blocks(self) -> list[Block]:
        return [block for block in self.layers if isinstance(block, Block)]

"""What a run with OpenAI's ViT-B/16 costs, computed from its shapes: `python -m benchmarks.gpu_estimate [--tflops 30]`.

No GPU is needed and nothing is measured: floating-point operations (a multiply-add counts as two) and bytes.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from benchmarks.harness import duration


class Tower(NamedTuple):
    """A transformer of CLIP."""

    width: int
    layers: int
    tokens: int

    def forward(self) -> float:
        """Operations of one input: 12·n·d² multiply-adds of the matrices and 2·n²·d of the attention, per layer."""
        n, d = self.tokens, self.width
        return 2.0 * self.layers * (12 * n * d * d + 2 * n * n * d)

    def parameters(self) -> int:
        return 12 * self.layers * self.width**2

    def activations(self) -> int:
        """Numbers that backward needs of one input: about 34 per token and unit of width, and the attention weights."""
        return self.layers * (34 * self.tokens * self.width + 2 * self.tokens**2 * self.width // 64)


VISION = Tower(768, 12, 197)
PROMPT = Tower(512, 12, 16)  # start, 10 prompt vectors, a name of about 4 tokens, end
DATA = {
    "cifar100": (100, 50_000, 10_000),
    "imagenet-r": (200, 24_000, 6_000),
    "cub200": (200, 5_994, 5_794),
    "ucf101": (100, 9_537, 3_783),
}
"""Classes, training pictures and test pictures."""
TASKS, STAGE1, STAGE2, BATCH = 10, 3, 5, 32


def operations(classes: int, train: int, test: int) -> dict[str, float]:
    """DMC-OT, ten tasks: operations of each part of a run."""
    seen = (TASKS + 1) / 2  # the mean over tasks of the share of classes seen, times the number of tasks
    return {
        "stage 1": 3 * VISION.forward() * train * STAGE1,
        "statistics": VISION.forward() * train * 2,
        "stage 2": 3 * PROMPT.forward() * classes * seen * train / TASKS * STAGE2 / BATCH,
        "test": VISION.forward() * test * seen,
    }


def memory() -> dict[str, float]:
    """Bytes at the highest point of stage 1 in float32, batch 32."""
    return {
        "weights": 4 * (VISION.parameters() + Tower(512, 12, 77).parameters() + 49_408 * 512),
        "gradients and AdamW": 3 * 4 * VISION.parameters(),
        "activations": 4 * BATCH * VISION.activations(),
        "Gaussians of 200 classes": 8 * 200 * 512 * 513,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tflops", type=float, default=30.0, help="10^12 operations a second that the GPU sustains")
    rate = parser.parse_args().tflops * 1e12
    print(f"DMC-OT with ViT-B/16, {TASKS} tasks, at {rate / 1e12:g} TFLOP/s sustained")
    for name, sizes in DATA.items():
        parts = operations(*sizes)
        shares = ", ".join(f"{part} {value / 1e15:.1f}" for part, value in parts.items())
        total = sum(parts.values())
        print(f"{name:10}  {total / 1e15:6.1f} PFLOP ({shares})  {duration(total / rate)}")
    parts = memory()
    shares = ", ".join(f"{part} {value / 1e9:.2f}" for part, value in parts.items())
    print(f"memory in stage 1, float32, batch {BATCH}: {sum(parts.values()) / 1e9:.1f} GB ({shares})")


if __name__ == "__main__":
    main()

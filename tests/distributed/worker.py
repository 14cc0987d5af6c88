"""One process of a run of several: learns two tasks with each method and saves parameters and predictions.

Usage: python worker.py RANK WORLD FOLDER METHOD…
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from clipcil import checks
from clipcil.clip import load_clip
from clipcil.experiment.evaluate import predict
from clipcil.methods.registry import methods


def main(rank: int, world: int, folder: Path, names: list[str]) -> None:
    if world > 1:
        dist.init_process_group("gloo", f"file://{folder / 'rendezvous'}", rank=rank, world_size=world)
    clip, data = load_clip("mini"), checks.some_classes(5)
    for name in names:
        fixture = checks.Fixture(methods()[name], clip, data, (3, 2), folder / "cache")
        fixture.learn()
        with torch.no_grad():
            guesses = torch.cat([predict(fixture.method, fixture.stream.test(index))[0] for index in range(2)])
        state = {f"state.{key}": value.contiguous().clone() for key, value in fixture.method.state_dict().items()}
        encoded = torch.tensor(fixture.reader.passed)
        save_file({"predictions": guesses, "encoded": encoded, **state}, folder / f"{name}-{world}-{rank}.safetensors")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])

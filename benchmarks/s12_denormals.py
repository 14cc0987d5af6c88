"""S12: training CLAP4CLIP in one thread: gradients that are almost 0 kept as they are, or rounded to 0."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import torch

import clipcil
from benchmarks.harness import Row, alternate, difference, versus


def run(quick: bool) -> list[Row]:
    tasks, accuracies = 1 if quick else 4, dict[str, torch.Tensor]()

    def learn(side: str) -> None:
        experiment = clipcil.Experiment("clap4clip", data="emoji", tasks=10, shots=1 if quick else None)
        for task in experiment:
            experiment.learn(task)
            if task.index + 1 == tasks:
                break
        accuracies[side] = torch.tensor([experiment.evaluate().last])

    def as_they_are() -> None:
        with patch("clipcil.training.trainer.flushed_denormals", nullcontext):
            learn("theirs")

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # other threads keep the setting with which they were started
    seconds = alternate({"theirs": as_they_are, "ours": lambda: learn("ours")}, 1, warm_up=False)
    torch.set_num_threads(threads)
    error = difference(accuracies["ours"], accuracies["theirs"])
    what = f"CLAP4CLIP, the first {tasks} of 10 tasks of emoji: gradients almost 0 kept, or rounded to 0; one thread"
    return [versus("S12", what, seconds, error=error, tolerance=0.01)]

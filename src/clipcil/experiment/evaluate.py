"""Measuring a method on the test pictures of every class seen so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from clipcil.data.reader import Pictures
from clipcil.data.tasks import TaskStream
from clipcil.distributed import gather, rank, share_bounds, world_size
from clipcil.methods.base import Method

BATCH = 256


@dataclass
class Record:
    """The counts of one evaluation, from which every metric is computed."""

    correct: list[int]
    """Correct predictions for each class seen."""
    total: list[int]
    """Test pictures of each class seen."""
    between_tasks: list[list[int]]
    """[i][j]: test pictures of task i classified as a class of task j."""
    predictions: list[list[int]] = field(default_factory=list)
    """The class predicted for each test picture, task by task; kept for the last task only."""
    probabilities: list[list[float]] = field(default_factory=list)
    """Softmax of the logits for the class predicted, likewise, rounded to four digits."""


def predict(method: Method, pictures: Pictures) -> tuple[Tensor, Tensor]:
    """The class with the highest score for each picture, (N,) int64, and its probability, (N,) float32: the softmax of
    the logits, or of cosines times CLIP's scale. Several processes predict a share each."""
    bounds = share_bounds(len(pictures))
    if world_size() > 1:
        _ = pictures.features  # encoded by all processes together; a share alone could not be
    own = pictures[bounds[rank()] : bounds[rank() + 1]]
    answers = [_answer(method.logits(batch), method.score_scale) for batch in own.batches(BATCH)]
    guesses = torch.cat([own.labels[:0], *(guess for guess, _ in answers)])
    probabilities = torch.cat([own.labels[:0].float(), *(probability for _, probability in answers)])
    return gather(guesses, bounds).cpu(), gather(probabilities, bounds).cpu()


@torch.no_grad()
def evaluate(method: Method, stream: TaskStream, last: int, sample: int | None = None) -> Record:
    """Predict the test pictures of tasks 0…last among all classes seen.

    Args:
        method: The method after task `last`.
        stream: The tasks.
        last: Index of the newest task.
        sample: Before the end of the stream, measure older tasks on at most this many of their test pictures, the same
            ones every time; None: on all.
    """
    is_last = last + 1 == len(stream)
    seen, sizes = method.seen, torch.tensor(stream.sizes[: last + 1])
    task_of = torch.repeat_interleave(torch.arange(last + 1), sizes)
    correct, total = torch.zeros(seen, dtype=torch.int64), torch.zeros(seen, dtype=torch.int64)
    between = torch.zeros(last + 1, last + 1, dtype=torch.int64)
    predictions, probabilities = [], []
    for index in range(last + 1):
        pictures = stream.test(index)
        if sample is not None and index < last and not is_last and sample < len(pictures):
            chosen = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(index))[:sample]
            pictures = pictures[chosen.sort().values]
        labels = pictures.labels.cpu()
        guess, sure = predict(method, pictures)
        correct += torch.bincount(labels[guess == labels], minlength=seen)
        total += torch.bincount(labels, minlength=seen)
        between[index] = torch.bincount(task_of[guess], minlength=last + 1)
        predictions.append(guess.tolist())
        probabilities.append([round(value, 4) for value in sure.tolist()])
    counts = (correct.tolist(), total.tolist(), between.tolist())
    return Record(*counts, predictions, probabilities) if is_last else Record(*counts)


def _answer(logits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The class predicted for each row of the logits (B, C), and its probability."""
    guess = logits.argmax(dim=1)
    return guess, (scale * logits.float()).softmax(dim=1).gather(1, guess[:, None])[:, 0]

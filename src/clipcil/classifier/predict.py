"""Predictions: pictures are decoded ahead by threads and scored in batches; memory stays the same for any number."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipcil.classifier.scoring import Calibration, probabilities
from clipcil.data.pictures import decode_and, decoding_pool
from clipcil.data.reader import Batch, TensorBatch
from clipcil.data.sources import as_picture
from clipcil.errors import UserError
from clipcil.methods.base import Method

PictureScores = tuple[Tensor, float | None]
"""Logits (C,) and novelty of one picture."""
PREDICTION_BATCH = 32
"""Pictures per pass."""
AHEAD = 3
"""Batches decoded ahead of the one being scored, and so the number of batches in memory."""


@dataclass(frozen=True)
class Prediction:
    """The predicted classes of a picture, the likeliest first.

    Examples:
        >>> import clipcil
        >>> clipcil.Prediction(["robin", "wren"], [0.9, 0.1]).name
        'robin'
        >>> clipcil.Prediction(["robin", "wren"], [0.4, 0.3], unknown=True).name is None
        True
    """

    names: list[str]
    probabilities: list[float]
    unknown: bool = False
    """Whether the picture is none of the classes, by the model's threshold; `names` still begins with the nearest."""
    error: str | None = None
    """Why the picture could not be read; then there are no names."""

    @property
    def name(self) -> str | None:
        """The likeliest class; None where the picture is unknown or broken."""
        return self.names[0] if self.names and not self.unknown else None

    def answer_to(self, true: str) -> str:
        """The likeliest class; of two equally likely ones the one that is not `true`, as chance is not right."""
        tied = len(self.names) > 1 and self.probabilities[0] == self.probabilities[1]
        return self.names[1] if tied and self.names[0] == true else self.names[0]


@dataclass(frozen=True)
class Scores:
    """How a method scores pictures; iterating gives the logits (C,) and the novelty of each picture."""

    logits: Tensor
    """(B, C) float32 on the CPU."""
    novelty: Tensor | None
    """(B,) float32 on the CPU, how unlike all classes each picture is; None for a method without such a score."""

    @classmethod
    def on_cpu(cls, logits: Tensor, novelty: Tensor | None) -> Scores:
        return cls(logits.float().cpu(), None if novelty is None else novelty.float().cpu())

    def __iter__(self) -> Iterator[PictureScores]:
        novelty = [None] * len(self.logits) if self.novelty is None else self.novelty.tolist()
        return zip(self.logits, novelty, strict=True)


@torch.no_grad()
def score(method: Method, batch: Batch) -> Scores:
    """The scores of a batch."""
    return Scores.on_cpu(method.logits(batch), method.novelty(batch))


def stream_scores(things: Iterable[Any], method: Method) -> Iterator[tuple[Any, PictureScores | UserError]]:
    """Each thing with its logits and novelty, or with the reason why it cannot be read; in the order they came."""
    preprocess = method.clip.preprocess

    def prepare(thing: Any) -> Tensor | UserError:
        is_path = isinstance(thing, str) or hasattr(thing, "__fspath__")
        called = str(thing) if is_path else f"what was given ({type(thing).__name__})"
        try:
            return decode_and(as_picture(thing), called, preprocess.picture)
        except UserError as error:
            return error

    def scored(batch: list[tuple[Any, Future[Tensor | UserError]]]) -> Iterator[tuple[Any, Any]]:
        results = [future.result() for _, future in batch]
        whole = [result for result in results if isinstance(result, Tensor)]
        found: Iterator[Any] = iter(())
        if whole:
            # Through half precision as in the cache on disk: learnt and predicted pictures are seen alike.
            pixels = preprocess.finish(torch.stack(whole)).half().float()
            found = iter(score(method, TensorBatch(method.clip, pixels.to(method.device))))
        for (thing, _), result in zip(batch, results, strict=True):
            yield thing, next(found) if isinstance(result, Tensor) else result

    pool = decoding_pool()
    try:
        waiting: deque[tuple[Any, Future[Tensor | UserError]]] = deque()
        for thing in things:
            waiting.append((thing, pool.submit(prepare, thing)))
            if len(waiting) == AHEAD * PREDICTION_BATCH:
                yield from scored([waiting.popleft() for _ in range(PREDICTION_BATCH)])
        while waiting:
            yield from scored([waiting.popleft() for _ in range(min(PREDICTION_BATCH, len(waiting)))])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a reader that stops early leaves nothing running


def most_likely(logits: Tensor, novelty: float | None, names: list[str], top: int, how: Calibration) -> Prediction:
    """Logits (C,) and novelty of one picture → its `top` likeliest classes."""
    best = probabilities(logits, how.temperature).topk(min(top, len(names)))
    chosen = [names[index] for index in best.indices.tolist()]
    return Prediction(chosen, best.values.tolist(), how.is_unknown(float(best.values[0]), novelty))

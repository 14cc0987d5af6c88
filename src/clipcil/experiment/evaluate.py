"""Measuring a method after each task: its predictions for the test pictures, and the drift of its stored Gaussians."""

import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from clipcil.data.reader import Pictures
from clipcil.data.tasks import TaskStream
from clipcil.distributed import gather, share, world_size
from clipcil.memory.gaussians import GaussianMemory
from clipcil.memory.ledoit_wolf import average_moments
from clipcil.methods.base import Method
from clipcil.transport import wasserstein2_to_samples

EVALUATION_BATCH = 256
DRIFT_PICTURES = 50
"""Pictures of a class that are encoded again to measure its drift; more would cost time and change little."""
DRIFT_CLASSES = 10
"""Old classes whose drift is measured: the first ones of each task, equally many and at least one."""


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
    rows, bounds = share(len(pictures))
    if world_size() > 1:
        _ = pictures.features  # encoded by all processes together; a share alone could not be
    own = pictures[rows]
    guesses, probabilities = [own.labels[:0]], [own.labels[:0].float()]
    for batch in own.batches(EVALUATION_BATCH):
        logits = method.logits(batch)
        guesses.append(logits.argmax(dim=1))
        probabilities.append((method.score_scale * logits.float()).softmax(dim=1).gather(1, guesses[-1][:, None])[:, 0])
    return gather(torch.cat(guesses), bounds).cpu(), gather(torch.cat(probabilities), bounds).cpu()


@torch.no_grad()
def evaluate(method: Method, stream: TaskStream, last: int, sample: int | None = None) -> Record:
    """Predict the test pictures of tasks 0…last among all classes seen.

    Before the end of the stream, older tasks are measured on at most `sample` of their test pictures, the same ones
    every time.
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


class Drift(NamedTuple):
    """How far the stored Gaussians lie from the features that the same pictures have now, before and after learning.

    Cosine: 1 − cos(stored mean, mean now); W₂: distance between the Gaussians. A perfect calibration would still show
    the floors: that of the cosine because at most `DRIFT_PICTURES` pictures are encoded again, that of W₂ because the
    stored covariance is shrunk.
    """

    cosine_before: float
    cosine_after: float
    cosine_floor: float
    w2_before: float
    w2_after: float
    w2_floor: float


def copy_memory(method: Method) -> GaussianMemory | None:
    """A copy of the method's Gaussians, to be compared after the tower has moved; None where it has none."""
    memory = getattr(method, "memory", None)
    has_moving = method.tunes_tower and isinstance(memory, GaussianMemory) and len(memory)
    return copy.deepcopy(memory) if has_moving else None


def measure_drift(before: GaussianMemory, method: Method, stream: TaskStream, tasks: int) -> dict[str, float]:
    """The mean drift over classes of the first `tasks` tasks, the first ones of each.

    Old training pictures are read again for this; methods see neither them nor these numbers.
    """
    after = method.memory
    assert isinstance(after, GaussianMemory)
    rows: list[Drift] = []
    for index in range(tasks):
        with stream.trained(index, DRIFT_PICTURES, max(1, DRIFT_CLASSES // tasks)) as pictures:
            features, labels = normalize(pictures.features, dim=-1).double(), pictures.labels
            for label in torch.unique(labels).tolist():
                rows.append(class_drift(features[labels == label], before, after, label))
    return Drift(*torch.tensor(rows, dtype=torch.float64).mean(0).tolist())._asdict()


def class_drift(real: Tensor, before: GaussianMemory, after: GaussianMemory, label: int) -> Drift:
    """The drift of one class, whose pictures have features `real` (m, d) now; m may be fewer than were stored.

    The mean of m of n pictures has expected squared error tr(S)(1/m − 1/n). In 1 − cosine this is half of it over
    ‖μ‖², ignoring the component along μ.
    """
    cosines, distances = [], []
    count, centre = len(real), real.mean(0)
    for memory in (before, after):
        mean, cov = memory.moments(label)
        cosines.append(float(1 - cosine_similarity(mean, centre, dim=0)))
        distances.append(float(wasserstein2_to_samples(mean, cov, real).sqrt()))
    spread = (real - centre).square().sum() / max(1, count - 1)
    missing = max(0.0, 1 / count - 1 / max(1, int(after.counts[label])))
    cosine_floor = float(spread * missing / (2 * centre.square().sum()))
    w2_floor = float(wasserstein2_to_samples(*average_moments([real]), real).sqrt())
    return Drift(cosines[0], cosines[1], cosine_floor, distances[0], distances[1], w2_floor)

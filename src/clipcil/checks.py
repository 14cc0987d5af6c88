"""The contract that every method keeps, as checks that anyone can run on a method of their own.

`check_method(Mine)` runs all of them on the embedded pictures; the tests of this package run the same checks on every
registered method. A check that fails raises AssertionError with what was found.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from clipcil.clip import CLIP, load_clip
from clipcil.data.dataset import Dataset, open_dataset
from clipcil.data.reader import Reader, TensorBatch
from clipcil.data.tasks import TaskStream
from clipcil.memory.exemplars import ExemplarMemory
from clipcil.memory.rows import FeatureRows
from clipcil.methods.base import Method, method_state, restore_method
from clipcil.tensor_store import TensorStore, read_entry
from clipcil.training.trainer import Trainer, Training

SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...] = (
    ("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("whether gradients are computed", torch.is_grad_enabled, torch.set_grad_enabled),
    ("the number of threads", torch.get_num_threads, torch.set_num_threads),
    ("the choice of algorithms", torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    ("the seed", torch.initial_seed, torch.manual_seed),
)
"""Settings of torch that concern more than one method: name, how to read it, how to restore it."""


def short_config(config: Any) -> Any:
    """The settings with one epoch for every stage, and 64 for a `field(default=2048, metadata={"in_checks": 64})`."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Training):
            changes[field.name] = dataclasses.replace(value, epochs=1, steps=0)
        elif "in_checks" in field.metadata:
            changes[field.name] = field.metadata["in_checks"]
    return dataclasses.replace(config, **changes)


class Fixture:
    """A method on a small stream of tasks, ready to learn, with stages of one epoch and a backbone of its own."""

    def __init__(self, kind: type[Method], clip: CLIP, data: Dataset, sizes: Sequence[int], cache: Path) -> None:
        self.given = (kind, clip, data, sizes, cache)
        own = clip.with_own_vision_tower()  # also for a method that should not change it: a check sees whether it does
        self.reader = Reader(own, cache)
        self.stream = TaskStream(data, self.reader, range(len(data.classes)), sizes)
        torch.manual_seed(0)
        self.method = kind(short_config(kind.Config()), own, Trainer(), data.templates)

    def again(self) -> Self:
        """The same method before it has learnt anything."""
        return type(self)(*self.given)

    def learn(self, start: int = 0, end: int | None = None) -> None:
        """Learn the tasks from `start` on, up to `end` and without it."""
        for task in self.stream.tasks(start):
            if task.index == end:
                return
            self.method.learn(task)

    @torch.no_grad()
    def scores(self, tasks: int, size: int = 64) -> Tensor:
        """Scores of the test pictures of the first tasks, in batches of `size`."""
        batches = [batch for task in range(tasks) for batch in self.stream.test(task).batches(size)]
        return torch.cat([self.method.logits(batch) for batch in batches])


def check_surroundings(fixture: Fixture) -> None:
    """Learning leaves the settings of torch as they were; scoring draws no random numbers, which would change what is
    learnt next."""
    torch.manual_seed(65537)  # not one that a method would set by itself
    before = [get() for _, get, _ in SETTINGS]
    try:
        for task in fixture.stream.tasks():
            fixture.method.learn(task)
            for (what, get, _), value in zip(SETTINGS, before, strict=True):
                assert get() == value, f"learning changed {what} from {value} to {get()}"
            drawn = torch.get_rng_state()
            with torch.no_grad():
                fixture.method.logits(fixture.stream.test(task.index))
            assert torch.equal(torch.get_rng_state(), drawn), "scoring changes the state of torch's random numbers"
    finally:  # a method that fails here must not spoil what runs after it
        for (_, _, restore), value in zip(SETTINGS, before, strict=True):
            restore(value)


def check_columns(fixture: Fixture) -> None:
    """One column of finite scores for each class seen."""
    for task in fixture.stream.tasks():
        fixture.method.learn(task)
        seen = sum(fixture.stream.sizes[: task.index + 1])
        assert fixture.method.names == fixture.stream.names[:seen]
        with torch.no_grad():
            scores = fixture.method.logits(fixture.stream.test(task.index)[:2])
        assert scores.shape == (2, seen) and torch.isfinite(scores).all()


@torch.no_grad()
def check_batch_independence(fixture: Fixture) -> None:
    """Scores are the same to 1e-5 of the largest in any batching and order; in one batch of all tasks, which holds
    pixels and no labels, to 1e-4, because the tower encodes it in another batch size."""
    with torch.enable_grad():
        fixture.learn()
    method, pictures = fixture.method, fixture.stream.test(0)
    whole = method.logits(pictures)
    tolerance = 1e-5 * max(1.0, float(whole.abs().max()))
    for size in (1, 7, 64):
        parts = torch.cat([method.logits(batch) for batch in pictures.batches(size)])
        assert torch.allclose(parts, whole, atol=tolerance, rtol=0), f"batches of {size} give other scores"
        same = torch.equal(parts.argmax(1), whole.argmax(1))
        assert same, f"batches of {size} give other answers: the scores of two classes are equal to rounding"
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(1))
    shuffled = method.logits(pictures[order])
    assert torch.allclose(shuffled, whole[order], atol=tolerance, rtol=0), "the order of the batch changes scores"
    alone = fixture.scores(len(fixture.stream), size=1)
    pixels = torch.cat([fixture.stream.test(task).pixels for task in range(len(fixture.stream))])
    mixed = method.logits(TensorBatch(fixture.method.clip, pixels))
    tolerance = 1e-4 * max(1.0, float(alone.abs().max()))
    assert torch.allclose(mixed, alone, atol=tolerance, rtol=0), "a batch of all tasks gives other scores"


def check_frozen(fixture: Fixture) -> None:
    """Only a method that tunes the tower changes it, and marks it as changed: else cached features would be stale."""
    clip, tunes = fixture.method.clip, fixture.method.tunes_tower
    before = {name: value.clone() for name, value in clip.state_dict().items()}
    for index in range(len(fixture.stream)):
        earlier, version = [value.clone() for value in clip.vision.parameters()], clip.version
        fixture.learn(index, index + 1)
        same = all(map(torch.equal, earlier, clip.vision.parameters()))
        assert same or clip.version != version, "the tower has moved and was not marked by clip.touch()"
    changed = [name for name, value in clip.state_dict().items() if not torch.equal(value, before[name])]
    assert bool(changed) == tunes, f"tunes_tower is {tunes}, and of the backbone were changed: {changed}"
    assert all(name.startswith("vision.") for name in changed), f"{changed} were changed"
    assert not any(parameter.requires_grad for parameter in clip.parameters())


def check_budget(fixture: Fixture) -> None:
    """What an exemplar method keeps never exceeds its budget; a method that keeps features of pictures says so."""
    keeping = [each for each in fixture.method.modules() if isinstance(each, ExemplarMemory | FeatureRows)]
    assert fixture.method.keeps_exemplars or not keeping, "it keeps features of pictures, and keeps_exemplars is False"
    memories = [memory for memory in keeping if isinstance(memory, ExemplarMemory)]
    for task in fixture.stream.tasks():
        fixture.method.learn(task)
        for memory in memories:
            most = fixture.method.seen * memory.budget.of_each(fixture.method.seen)
            assert 0 < len(memory) <= most, f"it keeps {len(memory)} exemplars, and may keep 1 to {most}"


def reload(fixture: Fixture) -> Fixture:
    """Save the method and load it into a fresh one on a fresh tower."""
    with tempfile.TemporaryDirectory(prefix="clipcil-") as folder:
        tensors, facts = read_entry(TensorStore(Path(folder)).save("state", *method_state(fixture.method)))
    assert facts["names"] == fixture.method.names
    fresh = fixture.again()
    if fresh.method.tunes_tower:
        for parameter in fresh.method.clip.vision.parameters():
            parameter.data.zero_()  # the checkpoint itself must bring the tower
    restore_method(fresh.method, tensors, facts)
    fresh.method.eval()
    return fresh


def check_round_trip(fixture: Fixture) -> None:
    """Saved and loaded before its last task, it scores the same, learns the last task to the same bits, and so again.

    Tensors lie in memory as loading lays them: otherwise some CPUs would round what is learnt next differently.
    """
    last = len(fixture.stream) - 1
    fixture.learn(end=last)
    again = reload(fixture)
    if last:
        assert torch.equal(again.scores(last), fixture.scores(last)), "saved and loaded, it scores otherwise"
    for each in (fixture, again):
        torch.manual_seed(1)
        each.learn(last)
    wanted = fixture.scores(last + 1)
    assert torch.equal(again.scores(last + 1), wanted), "saved and loaded, it learns the next task otherwise"
    for name, value in fixture.method.state_dict().items():
        assert value.is_contiguous(), f"{name} is not contiguous; a run that is resumed would not have the same bits"
    assert torch.equal(reload(fixture).scores(last + 1), wanted), "saved and loaded, it scores otherwise"


def check_same_seed(fixture: Fixture) -> None:
    """The same seed gives the same scores."""
    scores = []
    for _ in range(2):
        fixture = fixture.again()  # seeds and builds
        fixture.learn()
        scores.append(fixture.scores(len(fixture.stream)))
    assert torch.equal(*scores), "the same seed gives other scores the second time"


CHECKS: tuple[Callable[[Fixture], None], ...] = (
    check_surroundings,
    check_columns,
    check_batch_independence,
    check_frozen,
    check_budget,
    check_round_trip,
    check_same_seed,
)
"""The contract."""


def some_classes(count: int) -> Dataset:
    """The first classes of the embedded dataset."""
    data = open_dataset("emoji")
    train, test = (part.subset(torch.nonzero(part.labels < count).flatten()) for part in (data.train, data.test))
    return dataclasses.replace(data, classes=data.classes[:count], train=train, test=test)


def check_method(
    kind: type[Method], clip: CLIP | None = None, data: Dataset | None = None, sizes: Sequence[int] = (3, 1, 1)
) -> None:
    """Run every check on a method class; it need not be registered.

    They are the functions in `CHECKS`: scores of a picture that depend on that picture alone, frozen weights unchanged,
    the same scores after saving and loading and from the same seed, and a few more. The stream closes the pictures of a
    task when it ends, so that a method that reads them later raises a `UserError`.

    Args:
        kind: The method class. Each of its `Training` options is cut to one epoch.
        clip: The backbone; the embedded one by default.
        data: The pictures; a few classes of the embedded dataset by default.
        sizes: Number of classes of each task; they add up to the classes of `data`.

    Raises:
        AssertionError: If a check fails; the message says which.

    Examples:
        >>> import clipcil
        >>> clipcil.checks.check_method(clipcil.methods()["simplecil"])
    """
    clip = clip or load_clip("mini")
    data = data or some_classes(sum(sizes))
    with tempfile.TemporaryDirectory(prefix="clipcil-") as folder:
        for check in CHECKS:
            check(Fixture(kind, clip, data, sizes, Path(folder)))

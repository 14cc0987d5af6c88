"""What must hold for every method, as functions of a method class: the tests call them for all that are registered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipcil.clip import CLIP
from clipcil.data.dataset import Dataset
from clipcil.data.pictures import PictureSet
from clipcil.data.reader import Reader
from clipcil.data.stream import TaskStream
from clipcil.experiment.checkpoint import load_tensors, method_state, restore_method, save_tensors
from clipcil.experiment.run import own_tower
from clipcil.methods.base import Method
from clipcil.training.loop import Session, Training


def quick(config: Any) -> Any:
    """The same settings with one epoch for every stage."""
    changes = {
        field.name: dataclasses.replace(getattr(config, field.name), epochs=1)
        for field in dataclasses.fields(config)
        if isinstance(getattr(config, field.name), Training)
    }
    return dataclasses.replace(config, **changes)


class Watched(Reader):
    """A reader that writes down which picture sets were read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read: list[str] = []

    def pixels(self, pictures: PictureSet, rows: Tensor) -> Tensor:
        self.read.append(pictures.key)
        return super().pixels(pictures, rows)

    def encoded(self, pictures: PictureSet, rows: Tensor) -> Any:
        self.read.append(pictures.key)
        return super().encoded(pictures, rows)


@dataclasses.dataclass
class Bench:
    """A method on a small stream, ready to learn."""

    method: Method
    stream: TaskStream
    reader: Watched
    clip: CLIP

    def learn(self, tasks: int | None = None) -> None:
        for task in self.stream.tasks():
            if task.index == tasks:
                return
            self.method.train()
            self.method.learn(task)
            self.method.eval()

    @torch.no_grad()
    def scores(self, tasks: int, size: int = 64) -> Tensor:
        parts = [self.method.logits(b) for i in range(tasks) for b in self.stream.test(i).batches(size)]
        return torch.cat(parts)


def set_up(kind: type[Method], clip: CLIP, data: Dataset, sizes: Sequence[int], cache: Path, seed: int = 0) -> Bench:
    own = own_tower(clip)  # every method gets a copy, so that a test can see which ones change it
    reader = Watched(own, cache)
    stream = TaskStream(data, reader, range(len(data.classes)), sizes)
    torch.manual_seed(seed)
    return Bench(kind(quick(kind.Config()), own, Session()), stream, reader, own)


def check_columns(bench: Bench) -> None:
    for task in bench.stream.tasks():
        bench.method.train()
        bench.method.learn(task)
        bench.method.eval()
        seen = sum(bench.stream.sizes[: task.index + 1])
        assert bench.method.names == bench.stream.names[:seen]
        with torch.no_grad():
            scores = bench.method.logits(bench.stream.test(task.index)[:2])
        assert scores.shape == (2, seen)
        assert torch.isfinite(scores).all()


def check_batch_independence(bench: Bench) -> None:
    """The rows of any batching, and of a shuffled batch, are the same to 1e-5 of the largest score."""
    bench.learn()
    pictures = bench.stream.test(0)
    with torch.no_grad():
        whole = bench.method.logits(pictures)
        tolerance = 1e-5 * max(1.0, float(whole.abs().max()))
        for size in (1, 7, 64):
            parts = torch.cat([bench.method.logits(batch) for batch in pictures.batches(size)])
            assert torch.allclose(parts, whole, atol=tolerance, rtol=0), f"batches of {size} give other scores"
            assert torch.equal(parts.argmax(1), whole.argmax(1))
        order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(1))
        shuffled = bench.method.logits(pictures[order])
        assert torch.allclose(shuffled, whole[order], atol=tolerance, rtol=0), "the order of the batch changes scores"


def check_frozen(bench: Bench) -> None:
    before = {name: value.clone() for name, value in bench.clip.state_dict().items()}
    bench.learn()
    for name, value in bench.clip.state_dict().items():
        if not (bench.method.tunes_tower and name.startswith("vision.")):
            assert torch.equal(value, before[name]), f"{name} was changed"
    if bench.method.tunes_tower:
        moved = [
            name
            for name, value in bench.clip.vision.named_parameters()
            if not torch.equal(value, before[f"vision.{name}"])
        ]
        assert moved, "it says that it tunes the tower but the tower has not moved"
    assert not any(parameter.requires_grad for parameter in bench.clip.parameters())


def check_isolation(bench: Bench) -> None:
    """After a task has ended, none of its training pictures is read, and asking for one is an error."""
    ended: set[str] = set()
    for task in bench.stream.tasks():
        bench.reader.read.clear()
        bench.method.train()
        bench.method.learn(task)
        assert not ended & set(bench.reader.read), "pictures of a task that has ended were read"
        ended.add(task.pictures._set.key)


def check_budget(bench: Bench) -> None:
    """What an exemplar method keeps never exceeds its budget; other methods have no exemplar memory at all."""
    from clipcil.memory.exemplars import ExemplarMemory

    memories = [module for module in bench.method.modules() if isinstance(module, ExemplarMemory)]
    assert bool(memories) == bench.method.keeps_exemplars
    for task in bench.stream.tasks():
        bench.method.train()
        bench.method.learn(task)
        for memory in memories:
            assert 0 < len(memory) <= memory.budget(bench.method.seen)


def check_round_trip(kind: type[Method], bench: Bench, folder: Path) -> None:
    """save → load into a fresh method on a fresh tower → the very same scores."""
    bench.learn()
    tensors, facts = method_state(bench.method)
    save_tensors(folder / "state.safetensors", tensors, facts)
    tensors, facts = load_tensors(folder / "state.safetensors")
    assert facts["names"] == bench.method.names
    fresh_clip = own_tower(bench.clip)
    if kind.tunes_tower:
        for parameter in fresh_clip.vision.parameters():
            parameter.data.zero_()  # the checkpoint itself must bring the tower
    fresh = kind(bench.method.config, fresh_clip, Session())
    restore_method(fresh, tensors, facts)
    fresh.eval()
    fresh_clip.touch()
    stream = TaskStream(
        bench.stream.dataset, Reader(fresh_clip, bench.reader.cache), range(len(facts["names"])), bench.stream.sizes
    )
    again = Bench(fresh, stream, bench.reader, fresh_clip)
    assert torch.equal(again.scores(len(stream)), bench.scores(len(stream)))


def check_same_seed(make: Callable[[], Bench]) -> None:
    scores = []
    for _ in range(2):
        bench = make()  # seeds, builds
        bench.learn()
        scores.append(bench.scores(len(bench.stream)))
    assert torch.equal(*scores)


def run_all(kind: type[Method], clip: CLIP, data: Dataset, sizes: Sequence[int], cache: Path, folder: Path) -> None:
    """Every check, for a method that is not in the package."""
    make = lambda: set_up(kind, clip, data, sizes, cache)  # noqa: E731
    for check in (check_columns, check_batch_independence, check_frozen, check_isolation, check_budget):
        check(make())
    check_round_trip(kind, make(), folder)
    check_same_seed(make)

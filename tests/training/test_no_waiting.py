"""A training step asks the device for nothing; and mixed precision leaves the statistics alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.p2_features_once import OneTask
from benchmarks.p7_growth import Growth
from benchmarks.shapes import SMALL_TEXT
from clipcil.clip import CLIP
from clipcil.clip.text import padded
from clipcil.data.pictures import PictureSet
from clipcil.data.reader import Reader
from clipcil.data.tasks import Task
from clipcil.methods.dmc import DMC, DMCConfig
from clipcil.training.augment import TowerTraining
from clipcil.training.device import make_fabric
from clipcil.training.trainer import Trainer, Training
from clipcil.transport import bures_map
from support.features import FeaturePictures

WAITS = ("item", "__int__", "__float__", "__bool__", "__index__", "tolist", "numpy")


@contextmanager
def waits_forbidden(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every way of reading a tensor's value on the host raises, as each would stop a GPU's queue."""

    def refuse(name: str) -> Callable[..., Any]:
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"a step read a value back by Tensor.{name}")

        return read

    with patch.context() as inside:
        for name in WAITS:
            inside.setattr(Tensor, name, refuse(name))
        inside.setattr(torch, "tensor", refuse("tensor (a list copied to the device)"))
        inside.setattr("clipcil.clip.text.without_padding", padded)  # as on other devices than the CPU
        yield


class Strict(Trainer):
    """Forbids the waits inside the loss and backward of every step."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.patch, self.steps = patch, 0

    def fit(self, stage, parameters, data, loss, how, each_epoch=None, depends_on=None):
        flat = [p for group in parameters for p in (group["params"] if isinstance(group, dict) else [group])]

        def strict(*given: Any) -> Tensor:
            self.steps += 1
            with waits_forbidden(self.patch):
                value: Tensor = loss(*given)
                torch.autograd.grad(value, flat, retain_graph=True, allow_unused=True)
            return value

        super().fit(stage, parameters, data, strict, how, each_epoch)


def grown(train_old: bool = True) -> Growth:
    """A small DMC-OT that has learnt a task of ten classes."""
    growth = Growth(16, SMALL_TEXT, train_old)
    growth.skip()
    return growth


@pytest.mark.parametrize("train_old", [False, True])
def test_stage_two_never_waits(train_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with waits_forbidden(monkeypatch), pytest.raises(AssertionError, match="__int__"):
        int(torch.ones(()))  # the check itself notices a wait
    growth, trainer = grown(train_old), Strict(monkeypatch)
    growth.method.trainer = trainer
    growth.method.learn(growth.task())
    assert trainer.steps == 10  # 300 pictures


def test_stage_one_never_waits(tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.randn(6, 3, 16, 16)

    class Ready(FeaturePictures):
        """Pictures that lie on the device."""

        def __getitem__(self, rows: Any) -> Any:
            batch = super().__getitem__(rows)
            batch.pixels = pixels[rows]
            return batch

    trainer = Strict(monkeypatch)
    method = DMC(DMCConfig(stage1=TowerTraining(epochs=2, batch_size=4)), tiny_clip.with_own_vision_tower(), trainer)
    pictures = Ready(torch.randn(6, tiny_clip.config.dim), torch.arange(6) // 3)
    method.learn(Task(0, ["fox", "boat"], pictures))
    assert trainer.steps == 2 * 2 + 50  # the fewest steps of stage 2


@pytest.mark.parametrize("name", ["coop", "proof", "engine"])
def test_other_methods_never_wait(name: str, tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    task = OneTask(name, tiny_clip, epochs=1)
    trainer = Strict(monkeypatch)
    task.method.trainer = trainer
    task.ours()
    assert trainer.steps >= 1


def test_pictures_are_picked_without_reading_rows_back(tiny_clip: CLIP) -> None:
    """The rows given to the loss are on the device (here one without any values), the batch was picked on the host."""
    trainer = Trainer()
    trainer.device = torch.device("meta")
    pictures = Reader(tiny_clip, None).open(PictureSet("three", [b"", b"", b""], torch.tensor([5, 6, 7]), "three"))
    weight, seen = torch.nn.Parameter(torch.ones(())), []

    def loss(rows: Tensor, batch: Any) -> Tensor:
        assert rows.device.type == "meta"
        seen.append(batch.labels)
        return weight * 1.0

    trainer.fit("stage", [weight], pictures, loss, Training(epochs=1, batch_size=2))
    assert sorted(torch.cat(seen).tolist()) == [5, 6, 7]


def test_mixed_precision_leaves_statistics_and_map_in_float64() -> None:
    found = {}
    for precision in ("32-true", "bf16-mixed"):
        growth = grown()
        growth.method.trainer = Trainer(make_fabric("cpu", precision))
        torch.manual_seed(1)
        growth.method.learn(growth.task())
        found[precision] = growth.method
    memory, mixed = found["32-true"].memory, found["bf16-mixed"].memory
    for name in ("origin_means", "rows", "matrices", "offsets", "noises", "shrinkages"):
        assert getattr(mixed, name).dtype == torch.float64, name
        assert torch.equal(getattr(mixed, name), getattr(memory, name)), name
    prompts = [method.class_prompts[-1] for method in found.values()]
    assert not torch.equal(*prompts) and torch.allclose(*prompts, atol=0.05)  # mixed precision was on
    moments = memory.moments(0), memory.moments(1)
    plain = bures_map(*moments[0], *moments[1])
    with torch.autocast("cpu", torch.bfloat16):
        map = bures_map(*moments[0], *moments[1])
    assert map.matrix.dtype == torch.float64 and torch.equal(map.matrix, plain.matrix)

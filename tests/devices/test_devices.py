"""Every method on a GPU that is not there, and in half precision."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clipcil import checks
from clipcil.clip import CLIP
from clipcil.data.reader import Reader
from clipcil.data.tasks import TaskStream
from clipcil.methods.base import Method
from clipcil.methods.registry import methods
from clipcil.training.trainer import Trainer
from support.claimed import GPU, ClaimedDevices, MixedDevicesError, is_gpu

ALL = sorted(methods())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


class OnDevice(Trainer):
    """Trains on a device that is claimed, or under autocast on the CPU."""

    def __init__(self, device: torch.device, half: torch.dtype | None = None) -> None:
        super().__init__()
        self.device, self.half = device, half

    def autocast(self) -> Any:
        return torch.autocast("cpu", self.half, enabled=self.half is not None)


def test_the_mode_finds_a_mix() -> None:
    with ClaimedDevices():
        there, here = torch.ones(3, device=GPU), torch.ones(3)
        assert is_gpu(there + there) and there.device == GPU and not is_gpu(there.cpu())
        assert is_gpu(there[torch.tensor([0])]) and is_gpu(there * torch.tensor(2.0)) and is_gpu(here.to(GPU) + there)
        for mix in (lambda: there + here, lambda: torch.cat([there, here]), lambda: here[there.long()]):
            with pytest.raises(MixedDevicesError):
                mix()


def learn_and_score(kind: type[Method], backbone: CLIP, cache: Path) -> Tensor:
    """Two tasks and the scores of the test pictures of the second, on the claimed GPU."""
    data, clip = checks.some_classes(5), copy.deepcopy(backbone).to(GPU)
    stream = TaskStream(data, Reader(clip, cache, GPU), range(5), (3, 2), joint=kind.bound == "upper")
    torch.manual_seed(0)
    method = kind(checks.short_config(kind.Config()), clip, OnDevice(GPU), data.templates).to(GPU)
    for task in stream.tasks():
        method.learn(task)
    with torch.no_grad():
        return method.logits(stream.test(1))


@pytest.mark.parametrize("name", [*ALL, "dmc-ot on mini"])
def test_no_step_mixes_devices(name: str, tiny_clip: CLIP, mini: CLIP, cache: Path) -> None:
    """The embedded backbone has a trunk in front of its tower, which the tiny one has not."""
    method, _, backbone = name.partition(" on ")
    with ClaimedDevices():
        scores = learn_and_score(methods()[method], mini if backbone else tiny_clip, cache)
        assert is_gpu(scores) and scores.shape[1] == 5
    assert torch.isfinite(scores).all()


def test_a_method_that_mixes_is_caught(tiny_clip: CLIP, cache: Path) -> None:
    class Careless(methods()["simplecil"]):  # type: ignore[misc]
        name = "careless"

        def logits(self, batch):  # type: ignore[no-untyped-def]
            return super().logits(batch) + torch.zeros(self.seen)  # made on the CPU, whatever the device

    with ClaimedDevices(), pytest.raises(MixedDevicesError, match="add"):
        learn_and_score(Careless, tiny_clip, cache)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ALL)
def test_half_precision_trains_and_predicts(name: str, kind: torch.dtype, tiny_clip: CLIP, cache: Path) -> None:
    fixture = checks.Fixture(methods()[name], tiny_clip, checks.some_classes(5), (3, 2), cache)
    fixture.method.trainer = OnDevice(torch.device("cpu"), kind)
    fixture.learn()
    scores = fixture.scores(2)
    assert torch.isfinite(scores).all() and scores.dtype == torch.float32
    for key, value in fixture.method.state_dict().items():
        assert value.dtype not in (torch.bfloat16, torch.float16), f"{key} was stored in half precision"

"""Two processes against one, for every registered method: the same predictions and the same parameters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from clipcil.methods.registry import methods

WORKER = Path(__file__).with_name("worker.py")
ALL = sorted(methods())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what one process and what two processes came to, for all methods."""
    folder = tmp_path_factory.mktemp("world")
    for world in (1, 2):
        commands = [[sys.executable, str(WORKER), str(rank), str(world), str(folder), *ALL] for rank in range(world)]
        started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
        for process in started:
            _, errors = process.communicate(timeout=600)
            written = sorted(file.name for file in folder.glob(f"*-{world}-*.safetensors"))
            assert len(written) >= len(ALL), errors  # gloo may abort at exit, after its work is done
    return folder


@pytest.mark.parametrize("name", ALL)
def test_two_processes_learn_what_one_learns_and_encode_each_picture_once(name: str, results: Path) -> None:
    alone, first, second = (load_file(results / f"{name}-{world}.safetensors") for world in ("1-0", "2-0", "2-1"))
    assert int(first["encoded"] + second["encoded"]) == int(alone["encoded"])
    assert torch.equal(first["predictions"], alone["predictions"])
    assert alone.keys() == first.keys() == second.keys()
    for key, value in alone.items():
        if key.startswith("state."):
            assert torch.equal(first[key], second[key]), f"{key} differs between the two processes"
            one, two, atol = value.double(), first[key].double(), 1e-4
            if methods()[name].tunes_tower and one.numel():  # sums over features of a tuned tower round by their size
                atol = max(atol, 1e-6 * float(one.abs().amax()))
            torch.testing.assert_close(two, one, atol=atol, rtol=1e-4, msg=f"{key} differs")

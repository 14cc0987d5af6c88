"""Two processes against one, for every registered method: the same predictions and the same parameters.

`python test_two_processes.py RANK WORLD FOLDER METHOD…` is one process: it learns two tasks with each method, and saves
parameters and predictions.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from clipcil import checks
from clipcil.clip import load_clip
from clipcil.experiment.evaluate import predict
from clipcil.methods.registry import methods

ALL = sorted(methods())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what one process and what two processes came to, for all methods."""
    folder = tmp_path_factory.mktemp("world")
    for world in (1, 2):
        commands = [[sys.executable, __file__, str(rank), str(world), str(folder), *ALL] for rank in range(world)]
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
                largest = float(one.abs().amax())
                atol = max(atol, 1e-6 * largest)
                if name.startswith("dmc"):  # Adam makes whole steps of the rounding of a gradient near 0; few have one
                    atol = 2 * 2e-3 + atol
                    assert float((two - one).abs().mean()) <= 2e-3 * max(largest, 1e-2), (
                        f"{key} differs in many numbers"
                    )
            torch.testing.assert_close(two, one, atol=atol, rtol=1e-4, msg=f"{key} differs")


def work(rank: int, world: int, folder: Path, names: list[str]) -> None:
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
    work(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])

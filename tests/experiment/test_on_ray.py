"""A grid on a Ray cluster of two machines, one of which is lost: every run ends, with the bytes of one process."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from clipcil.errors import UserError
from clipcil.experiment.bench import run_grid
from clipcil.experiment.grid import plan
from clipcil.experiment.spec import Grid
from support.processes import start
from support.short_runs import digest

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own 15 would starve its workers while other tests run
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Any:
    """Two machines of one core each, as processes of this one."""
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    for left in (2, 1, 0):
        try:
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **memory})
            cluster.add_node(num_cpus=1, **memory)
            break
        except Exception as error:  # Ray gives a machine 30 s to start, which a busy one does not always keep
            if not left or "timed out" not in str(error):
                raise
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def grid_for(pictures: Path, **changes: Any) -> Grid:
    options = {"methods": ("simplecil", "rapf"), "data": ("folder",), "data_root": (f"folder={pictures}",), "seeds": 6}
    return Grid(**{**options, "set": ("adapter.epochs=2",), "run": {"tasks": 2, "device": "cpu"}, **changes})


def test_a_grid_survives_the_loss_of_a_machine(cluster: Any, pictures: Path, tmp_path: Path) -> None:
    here = grid_for(pictures, out=tmp_path / "here")
    on_ray = grid_for(pictures, out=tmp_path / "ray", on="ray", address=cluster.address)
    one, two, told = plan(here), plan(on_ray), list[str]()
    run_grid(one, here)

    def lose_a_machine() -> None:
        while sum((each.folder / "results.json").exists() for each in two) < 3:
            time.sleep(0.05)
        (lost,) = cluster.worker_nodes
        cluster.remove_node(lost, allow_graceful=False)

    loser = threading.Thread(target=lose_a_machine, daemon=True)
    loser.start()
    finished = run_grid(two, on_ray, told.append)
    loser.join()
    assert [each.error for each in finished] == [""] * 12, told
    assert len(told) == 12 and not cluster.worker_nodes
    assert [digest(each.folder) for each in one] == [digest(each.folder) for each in two]
    again = list[str]()
    run_grid(two, on_ray, again.append)
    assert all(line.endswith("(done before)") for line in again)


def test_a_folder_that_a_machine_cannot_write_to_is_refused_before_anything_runs(
    cluster: Any, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that the machines look for is never made, as if theirs were another folder."""
    real = Path.touch
    monkeypatch.setattr(Path, "touch", lambda self, *more: None if self.name[:8] == ".shared-" else real(self, *more))
    grid = grid_for(pictures, out=tmp_path / "out", on="ray", address=cluster.address)
    with pytest.raises(UserError, match=r"of the cluster cannot be used: .*out is not the folder that it is here"):
        run_grid(plan(grid), grid)
    assert not list((tmp_path / "out").iterdir())


def test_an_interrupted_grid_is_continued_to_the_same_bytes(cluster: Any, pictures: Path, tmp_path: Path) -> None:
    changes = {"methods": ("rapf",), "seeds": 2, "set": ("adapter.epochs=200", "adapter.batch_size=4")}
    here = grid_for(pictures, out=tmp_path / "here", **changes)
    on_ray = grid_for(pictures, out=tmp_path / "ray", on="ray", address=cluster.address, **changes)
    words = ["bench", "--methods", "rapf", "--data", "folder", "--data-root", *here.data_root, "--seeds", "2"]
    words += ["--tasks", "2", "--device", "cpu", "--set", *changes["set"], "--out", str(on_ray.out)]
    words += ["--on", "ray", "--address", cluster.address]
    child = start(tmp_path, *words)
    runs = plan(on_ray)
    while not any((each.folder / "checkpoint").is_dir() for each in runs):
        assert child.poll() is None, child.communicate()
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=300)
    assert child.returncode == 130 and "the same command continues" in errors and "Traceback" not in errors, errors
    assert not all((each.folder / "results.json").exists() for each in runs)
    finished = run_grid(runs, on_ray)
    assert [each.error for each in finished] == ["", ""]
    run_grid(plan(here), here)
    assert [digest(each.folder) for each in plan(here)] == [digest(each.folder) for each in runs]


def test_a_run_with_a_gpu_is_a_run_on_cuda() -> None:
    assert Grid(on="ray", gpus_per_run=1).run == {"device": "cuda"}
    assert Grid(on="ray", gpus_per_run=1, run={"device": "auto"}).run == {"device": "auto"}

"""Methods and datasets of other packages: installed, they appear and run; broken, they cost one warning line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
METHOD = '''
"""Coin: scores from a fixed random projection."""
import torch
import clipcil

class Coin(clipcil.Method):
    name, title = "coin", "A coin"
    def learn_task(self, task):
        pass
    def logits(self, batch):
        generator = torch.Generator().manual_seed(0)
        return batch.features @ torch.randn(self.dim, self.seen, generator=generator)
'''
DATASET = """
from PIL import Image
from clipcil.data.dataset import Dataset, register

@register("colours", "plain colours", "nothing")
def open_colours(root, options):
    def pictures(size):
        return {name: [Image.new("RGB", (size, size), name)] * 2 for name in ("red", "green", "blue", "black")}
    return Dataset.from_pictures("colours", pictures(40), pictures(50))
"""


def install(site: Path, package: str, code: str, points: str) -> None:
    """As pip leaves it: a module and its dist-info."""
    site.mkdir(exist_ok=True)
    (site / f"{package}.py").write_text(code)
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site = tmp_path / "site"
    points = "[clipcil.methods]\ncoin = tossing:Coin\n"
    install(site, "tossing", METHOD, points)
    install(site, "colouring", DATASET, "[clipcil.datasets]\ncolours = colouring\n")
    return site


def clipcil(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(ROOT / "src")])
    environment = os.environ | {"PYTHONPATH": path, "CLIPCIL_CACHE": str(site / "cache"), "COLUMNS": "200"}
    command = [sys.executable, "-m", "clipcil", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_an_installed_method_learns_an_installed_dataset(site: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = clipcil(site, "bench", "--methods", "coin", "--data", "colours", "--tasks", "2", "--out", str(out))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "A coin on colours, seed 0: A_B" in done.stdout and list(out.glob("colours-coin-*/results.json"))


def test_a_broken_package_costs_a_line_and_nothing_else(site: Path) -> None:
    install(site, "broken", "import nothing_of_that_name", "[clipcil.methods]\nbad = broken:Bad\n")
    install(site, "taken", METHOD.replace('"coin"', '"dmc"'), "[clipcil.methods]\ndmc = taken:Coin\n")
    install(site, "leaving", "import sys; sys.exit(3)", "[clipcil.datasets]\nleaving = leaving\n")
    done = clipcil(site, "methods")
    assert done.returncode == 0 and "A coin" in done.stdout and "DMC-OT" in done.stdout
    assert done.stderr.splitlines() == [
        "clipcil: warning: clipcil.methods 'bad' of broken is not used: ModuleNotFoundError:"
        " No module named 'nothing_of_that_name'",
        "clipcil: warning: clipcil.methods 'dmc' of taken is not used: ValueError:"
        " two methods are called 'dmc': clipcil.methods.dmc.DMC and taken.Coin",
    ]
    done = clipcil(site, "datasets")
    assert done.returncode == 0 and "plain colours" in done.stdout
    assert done.stderr == "clipcil: warning: clipcil.datasets 'leaving' of leaving is not used: SystemExit: 3\n"

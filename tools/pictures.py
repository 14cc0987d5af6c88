"""The pictures of the README and the docs, made from a real model and real runs (needs Chromium and its driver).

    python tools/pictures.py

`docs/pictures/page.png` is the page of `clipcil serve` after two lessons of emoji; `docs/pictures/start.png` shows it
beside the accuracy over tasks of the runs in `reproduce/evidence`.
"""

import base64
import io
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from clipcil.data.dataset import open_dataset  # noqa: E402
from clipcil.report.compare import group_runs, method_title  # noqa: E402
from clipcil.report.runs import find_runs  # noqa: E402
from support.browser import Browser  # noqa: E402
from support.server import png, running  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
LESSONS = (("apple", "banana", "bicycle", "bus", "camera", "castle"), ("dolphin", "fox", "guitar", "hamburger", "owl"))
METHODS = ("strata", "ranpac", "dmc-ot", "simplecil", "zero-shot")


def page() -> Image.Image:
    """The page at 1280 × 800, with a prediction for a test picture."""
    data = open_dataset("emoji")
    of = {part: {name: [] for name in data.classes} for part in ("train", "test")}
    for part in of:
        pictures = getattr(data, part)
        for row, label in enumerate(pictures.labels.tolist()):
            of[part][data.classes[label]].append(pictures.image(row))
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "model", Path(folder) / "cache") as server:
        for names in LESSONS:
            server.teach({name: [png(picture) for picture in of["train"][name]] for name in names})
        picture = Path(folder) / "new.png"
        of["test"]["fox"][0].resize((256, 256)).save(picture)
        with Browser() as browser:
            browser.show(server.address, 1280, 800)
            browser.wait("'ready' in document.documentElement.dataset")
            browser.drop("#try-stage", picture)
            browser.wait("document.querySelector('#answer')?.textContent.includes('fox')")
            browser.run("window.scrollTo(0, 0)")
            shot = browser.cdp("Page.captureScreenshot", {"format": "png"})["data"]
    return Image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB")


def curves(height: int) -> Image.Image:
    """A_k of some methods on emoji in 10 tasks: the mean over three class orders."""
    groups = [
        group
        for group in group_runs(find_runs([ROOT / "reproduce" / "evidence" / "claims"]))
        if group.stream[:2] == ("emoji", 10) and len(group.orders) == 3
    ]
    figure, axes = plt.subplots(figsize=(7, height / 100), dpi=100)
    for method in METHODS:
        group = next(each for each in groups if each.label == method_title(method))
        mean = np.mean([run.after for run in group.runs], axis=0)
        axes.plot(range(1, len(mean) + 1), mean, marker="o", linewidth=2, label=f"{group.label}  {mean[-1]:.0f} %")
    axes.set(xlabel="tasks learnt, 10 classes each", ylabel="accuracy on all classes so far, %", ylim=(0, 100))
    axes.set_title("100 classes in 10 tasks; mean of three class orders")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    figure.tight_layout()
    written = io.BytesIO()
    figure.savefig(written)
    return Image.open(written).convert("RGB")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    left = page()
    left.save(FOLDER / "page.png", optimize=True)
    right = curves(left.height)
    both = Image.new("RGB", (left.width + right.width, left.height), "white")
    both.paste(left, (0, 0))
    both.paste(right, (left.width, 0))
    both.resize((both.width * 2 // 3, both.height * 2 // 3), Image.Resampling.LANCZOS).save(
        FOLDER / "start.png", optimize=True
    )


if __name__ == "__main__":
    main()

"""Digests of everything that methods and lessons predict, to show that a change of the code changed no number.

Keep them with the code before the change, compare with the code after it, on one machine and with one thread:

    OMP_NUM_THREADS=1 python reproduce/same_numbers.py before.json --data-root DIR
    OMP_NUM_THREADS=1 python reproduce/same_numbers.py before.json --data-root DIR --compare

The digest of a task is that of the logits of all test pictures seen so far, bit by bit.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import clipcil


def digests_of_run(method: str, **options: object) -> list[str]:
    """The digest after each task of a run."""
    experiment = clipcil.Experiment(method, tasks=5, seed=0, **options)
    found = []
    for task in experiment:
        experiment.learn(task)
        experiment.evaluate()
        seen = map(experiment.stream.test, range(task.index + 1))
        with torch.no_grad():
            logits = [experiment.method.logits(batch) for test in seen for batch in test.batches(256)]
        found.append(hashlib.sha256(torch.cat(logits).numpy().tobytes()).hexdigest()[:16])
    return found


def write_lessons(folder: Path) -> None:
    """Two folders of emoji to learn from, 10 classes each, and one to predict."""
    import pyarrow.parquet

    pictures = Path(clipcil.__file__).parent / "data" / "emoji" / "emoji.parquet"
    rows = pyarrow.parquet.read_table(pictures).to_pylist()
    names = sorted({str(row["label"]) for row in rows})[:20]
    for place, row in enumerate(rows):
        name = str(row["label"])
        if name in names:
            lesson = "test" if row["split"] == "test" else "first" if names.index(name) < 10 else "second"
            target = folder / lesson / name / f"{place}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(row["image"]["bytes"])


def digests_of_lessons(method: str) -> list[str]:
    """The digest of what `clipcil predict` prints after each of two lessons."""
    found = []
    with tempfile.TemporaryDirectory() as folder:

        def printed(*words: str) -> bytes:
            command = [sys.executable, "-m", "clipcil", *words]
            return subprocess.run(command, cwd=folder, check=True, capture_output=True).stdout

        write_lessons(Path(folder))
        for lesson in ("first", "second"):
            printed("learn", "model", lesson, "--method", method)
            found.append(hashlib.sha256(printed("predict", "model", "test", "--json")).hexdigest()[:16])
    return found


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("file", type=Path, help="file of the digests")
    words.add_argument("--data-root", type=Path, help="folder that holds cifar100/; without it CIFAR-100 is left out")
    words.add_argument("--compare", action="store_true", help="compare with the digests in the file")
    words.add_argument("--only", help="only the parts whose name has this text in it")
    chosen = words.parse_args()
    torch.set_num_threads(1)
    parts = {f"emoji {name}": lambda name=name: digests_of_run(name) for name in sorted(clipcil.methods())}
    if chosen.data_root is not None:
        root = chosen.data_root / "cifar100"
        parts["cifar100 dmc-ot"] = lambda: digests_of_run("dmc-ot", data="cifar100", data_root=root, shots=10)
    parts |= {f"lessons {name}": lambda name=name: digests_of_lessons(name) for name in ("strata", "dmc-ot")}
    before = json.loads(chosen.file.read_text()) if chosen.file.exists() else {}
    wrong = 0
    for name, part in parts.items():
        if (chosen.only and chosen.only not in name) or (not chosen.compare and name in before):
            continue
        found = part()
        if chosen.compare:
            same = before.get(name) == found
            wrong += not same
            print(f"{name:24} {'same' if same else f'DIFFERENT: {before.get(name)} before, {found} now'}", flush=True)
        else:
            before[name] = found
            chosen.file.write_text(json.dumps(before, indent=1))
            print(f"{name:24} {found}", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()

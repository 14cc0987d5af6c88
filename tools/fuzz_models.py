"""Bad inputs for models, reports, descriptions and grids; see `fuzz_inputs`.

What lies in `place/in` must not be changed by the command; `place/in/mine` holds files of a user, which hostile links
in `place/model` and `place/run` lead to. A model in `place/model` must be usable after a command that succeeds, and be
as it was after one that is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import tomli_w
from fuzz_inputs import ODD_VALUES, Maker
from fuzz_pictures import add_oddity, damaged, encoded, picture
from fuzz_server import KINDS

METHODS = ("discriminant", "simplecil", "strata", "zero-shot")
"""Methods of the models that are made once, in `stock/model-METHOD`."""
ODD_NAMES = (
    b"cat",
    b"m[red]x",
    b"\xe9\xff",
    b"\x1b[2Jx",
    "Ā🦊".encode(),
    b"CAT",
    b"dog_house",
    b"a" * 250,
    b"-x",
    b"=1+1",
    b"{}",
    b"$x$",
    b"con",
)
ODD_JSON: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**12,
    2**70,
    1.5,
    "",
    "x",
    "a" * 5000,
    "\x1b[2J",
    [],
    {},
    [[1]],
    [None],
)
ODD_TOML = (
    "nan",
    "inf",
    "-inf",
    "1e999",
    "2020-01-01",
    "[[[[[]]]]]",
    '"\\u0000"',
    "-1",
    "true",
    '""',
    "[10000000000000]",
)


def mine(place: Path) -> Path:
    """Files of a user."""
    folder = place / "in" / "mine"
    (folder / "stages-0000").mkdir(parents=True)
    for name in ("thesis.pdf", "stages-0000/x.safetensors", "task-0001.json", "results.json"):
        (folder / name).write_text("mine")
    return folder


def week(place: Path, chance: Random) -> Path:
    """A lesson: class folders with odd names and odd pictures."""
    root = place / "in" / "week"
    for name in chance.sample(ODD_NAMES, chance.randint(1, 3)):
        folder = Path(os.fsdecode(os.fsencode(root) + b"/" + name))
        folder.mkdir(parents=True)
        for number in range(chance.choice((1, 2, 6))):
            (folder / f"{number}.png").write_bytes(encoded(picture(chance), "PNG"))
        if chance.random() < 0.3:
            add_oddity(folder, chance)
    if chance.random() < 0.15:
        (root / "loop").symlink_to(root, target_is_directory=True)
    return root


def mutated(value: Any, chance: Random) -> Any:
    """The same JSON with one entry replaced, taken out or added."""
    copy = json.loads(json.dumps(value))
    spots: list[tuple[Any, Any]] = []

    def collect(item: Any) -> None:
        for key in item if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ():
            spots.append((item, key))
            collect(item[key])

    collect(copy)
    for _ in range(chance.choice((1, 1, 2))):
        item, key = chance.choice(spots)
        if chance.random() < 0.2 and isinstance(item, dict):
            item.pop(key, None)
        elif isinstance(item, dict) or key < len(item):
            item[key] = chance.choice(ODD_JSON)
    return copy


def replace_by_link(path: Path, target: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def spoil_model(model: Path, own: Path, chance: Random) -> None:
    """Something is wrong with a model: its table, its weights, a link, a pipe, a user's file beside it."""
    table, weights = model / "model.toml", next(model.glob("weights-*"))
    kind = chance.randrange(10)
    if kind < 3:
        changed = mutated(tomllib.loads(table.read_text()), chance)
        table.write_text(tomli_w.dumps(without_none(changed)))
    elif kind == 3:
        lines = table.read_text().splitlines()
        place = chance.randrange(len(lines))
        lines[place] = f"{lines[place].partition('=')[0]} = {chance.choice((*ODD_TOML, *ODD_VALUES))}"
        table.write_text("\n".join(lines))
    elif kind == 4:
        table.write_bytes(damaged(table.read_bytes(), chance))
    elif kind in (5, 6):
        reweigh(model, weights, chance)
    elif kind == 7:
        replace_by_link(chance.choice((table, weights, model / "README.md", model / ".lock")), own / "thesis.pdf")
    elif kind == 8:
        path = chance.choice((table, weights))
        path.unlink()
        os.mkfifo(path)
    else:
        (model / chance.choice(("weights.safetensors", ".x.part", "previous.toml", ".lock"))).write_text("mine")


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value if item is not None]
    return min(value, 2**63 - 1) if isinstance(value, int) and not isinstance(value, bool) else value


def reweigh(model: Path, weights: Path, chance: Random) -> None:
    """Other numbers or shapes among the weights, under the right checksum."""
    import torch
    from safetensors.torch import load_file, save

    tensors = load_file(weights)
    key = chance.choice(sorted(tensors))
    old = tensors[key]
    value = chance.choice((0.0, 1e30, -1.0, float("nan"), float("inf")))
    whole = value if old.is_floating_point() else chance.choice((0, -1, 2**40))
    if old.dtype in (torch.bool, torch.int8, torch.uint8):
        whole = 1
    choices: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: torch.full_like(old, whole),
        lambda: old[:1] if old.ndim else old,
        lambda: old.flatten(),
        lambda: torch.cat([old, old]) if old.ndim else old,
        lambda: old.double() if old.is_floating_point() else old.float(),
        lambda: old.new_zeros(()),
    )
    tensors[key] = chance.choice(choices)().contiguous().clone()
    if chance.random() < 0.2:
        del tensors[key]
    data = save(tensors)
    checksum = hashlib.sha256(data).hexdigest()
    name = f"weights-{checksum[:12]}.safetensors"
    table = tomllib.loads((model / "model.toml").read_text())
    weights.unlink()
    (model / name).write_bytes(data)
    (model / "model.toml").write_text(tomli_w.dumps({**table, "weights": name, "sha256": checksum}))


def models(place: Path, chance: Random, stock: Path) -> list[str]:
    """A model of a stranger, or one's own with odd words."""
    model = place / "model"
    shutil.copytree(stock / f"model-{chance.choice(METHODS)}", model)
    own = mine(place)
    if chance.random() < 0.75:
        spoil_model(model, own, chance)
    return model_words(place, model, chance)


def model_words(place: Path, model: Path, chance: Random) -> list[str]:
    odd = os.fsdecode(chance.choice(ODD_NAMES))
    name = chance.choice(("red", "blue", "RED", odd, ""))
    kind = chance.choice(("learn", "learn", "predict", "predict", "predict", "forget", "rename", "show", "export"))
    if kind == "learn":
        return ["learn", str(model), str(week(place, chance)), *chance.choice(([], ["--quiet"], ["--skip-broken"]))]
    if kind == "predict":
        pictures = week(place, chance)
        more = chance.choice(
            ([], ["--json"], ["--csv"], ["--csv", "--top", "30000000"], ["--top", "0"], ["--folder-out", "sorted"])
        )
        if "--folder-out" in more:
            (place / "sorted").mkdir()
            (place / "sorted" / "red").symlink_to(place / "in" / "mine")
            more = [*more, "--by", chance.choice(("copy", "link"))]
        return ["predict", str(model), str(pictures), *more]
    if kind == "forget":
        return ["forget", str(model), name]
    if kind == "rename":
        return ["rename", str(model), name, chance.choice((odd, "green apple", "blue", " ", "\x1b[2J"))]
    if kind == "show":
        return ["show", str(model), *chance.choice(([], ["--json"]))]
    if chance.random() < 0.5:
        out = place / "in" / "export"
        out.mkdir(parents=True)
        (out / chance.choice(("classes.json", "model.pt2", "classifier.safetensors"))).write_text("mine")
        return ["export", str(model), "--out", str(out)]
    return ["export", str(model), "--out", str(chance.choice((place / "out", place / "in" / "mine" / "thesis.pdf")))]


def lessons(place: Path, chance: Random, stock: Path) -> list[str]:
    """A first lesson into a folder that holds other things, or none."""
    source, own = week(place, chance), mine(place)
    folder = place / "in" / "folder"
    folder.mkdir()
    names = ("weights.safetensors", "weights-best.safetensors", ".thesis.part", "README.md", ".lock", "model.toml")
    for name in chance.sample(names, chance.randint(1, 2)):
        (folder / name).write_text("mine")
    (place / "link").symlink_to(own)
    where = chance.choice((folder, folder, place / "new", place / "new" / "er", place / "link", own / "thesis.pdf"))
    return ["learn", str(where), str(source), "--method", chance.choice(("simplecil", "discriminant", "zero-shot"))]


def reports(place: Path, chance: Random, stock: Path) -> list[str]:
    """A finished run of a stranger, or a report into a place that is taken."""
    run, own = place / "run", mine(place)
    shutil.copytree(stock / "whole", run)
    for _ in range(chance.choice((0, 1, 1, 2))):
        file = run / chance.choice(
            ("results.json", "results.json", "timing.json", "environment.json", "predictions.csv")
        )
        kind = chance.randrange(6)
        if kind < 3 and file.suffix == ".json" and file.is_file() and not file.is_symlink():
            file.write_text(json.dumps(mutated(json.loads(file.read_text()), chance)))
        elif kind == 3:
            replace_by_link(file, chance.choice((own / "thesis.pdf", Path("/dev/zero"))))
        elif kind == 4 and file.is_file():
            file.write_text(chance.choice(("[" * 50_000, '{"last": NaN}', "", "{}", '{"a": "\\ud800"}')))
        elif file.is_file() and not file.is_symlink():
            file.write_bytes(damaged(file.read_bytes(), chance))
    results = run / "results.json"
    if chance.random() < 0.2 and results.is_file() and not results.is_symlink():
        text = results.read_text(errors="replace").replace('"data": "folder"', f'"data": {json.dumps(str(own / "x"))}')
        results.write_text(text)
    outs = (None, None, None, place / "page.html", own / "results.json", own, place / "none" / "page.html")
    out = chance.choice(outs)
    return ["report", str(run), *([] if out is None else ["--out", str(out)])]


def links(place: Path, chance: Random, stock: Path) -> list[str]:
    """A stopped run of a stranger whose files are links to files of the user."""
    run, own = place / "run", mine(place)
    shutil.copytree(stock / "stopped", run)
    for name in chance.sample(("steps.jsonl", "checkpoint", "config.toml", "environment.json", ".lock"), 1):
        target = own if name == "checkpoint" else own / "thesis.pdf"
        replace_by_link(run / name, target)
    return ["run", "--resume", str(run)]


def grids(place: Path, chance: Random, stock: Path) -> list[str]:
    """A bench into a folder where something is in the way."""
    root, own = place / "in" / "pictures", mine(place)
    shutil.copytree(stock / "pictures", root)
    out = place / "out"
    out.mkdir()
    log = out / "results.jsonl"
    kind = chance.randrange(6)
    if kind == 0:
        log.symlink_to(own / "thesis.pdf")
    elif kind == 1:
        log.mkdir()
    elif kind == 2:
        log.write_text(chance.choice(('{"run": [], "status": "done"}\n', '{"run": "x", "sta', "[" * 50_000)))
    elif kind == 3:
        os.mkfifo(log)
    elif kind == 4:
        out = own / "thesis.pdf"
    words = ["--methods", "simplecil", "--data", "folder", "--data-root", f"folder={root}", "--tasks", "3"]
    return ["bench", *words, "--out", str(out), *chance.choice(([], ["--seeds", "2"], ["--quiet"]))]


def descriptions(place: Path, chance: Random, stock: Path) -> list[str]:
    """`describe` with servers, files and addresses of strangers."""
    root, own = place / "in", mine(place)
    names = root / "names.txt"
    bad = (b"cat\n", b"", b"cat\ncat\n", b"\xff\n\xfe\n", b"a\x1b[2J\nb\n")
    names.write_bytes(chance.choice(bad) if chance.random() < 0.3 else b"cat\ndog\nbird\n")
    server = (stock / "server").read_text()
    wrong = ("http://[::1", "http://me:sk-fuzz-secret@localhost/v1", "x", "http://127.0.0.1:1/v1", "http://a b")
    url = f"{server}/{chance.choice(KINDS)}" if chance.random() < 0.8 else chance.choice(wrong)
    out = place / "out.json"
    kind = chance.randrange(10)
    if kind == 0:
        out.write_text(chance.choice(("[1]", "{", '{"cat": {"dog": ["\\ud800"]}}', '{"cat": 1}', "[" * 50_000)))
    elif kind == 1:
        out.symlink_to(own / "thesis.pdf")
    elif kind == 2:
        out = Path("/dev/zero")
    words = ["--endpoint", url, "--model", chance.choice(("m", "\udcff", "")), "--out", str(out)]
    return ["describe", str(names), *words, *chance.choice(([], ["--key-from", "FUZZ_KEY"]))]


def full(place: Path, chance: Random, stock: Path) -> list[str]:
    """A file system without room; `place/full` is one of a few kilobytes where the tool may mount one."""
    disk = place / "full"
    mine(place)
    if chance.random() < 0.7:
        try:
            shutil.copytree(stock / "model-discriminant", disk / "model")
            (place / "model").symlink_to(disk / "model")
            return model_words(place, disk / "model", chance)
        except (OSError, shutil.Error):
            shutil.rmtree(disk / "model", ignore_errors=True)
            (place / "model").unlink(missing_ok=True)
    root = place / "in" / "pictures"
    shutil.copytree(stock / "pictures", root)
    words = ["--data", "folder", "--data-root", str(root), "--increment", "2", "--out", str(disk / "run")]
    return ["run", "rapf", *words, "--set", "adapter.epochs=1"]


MODEL_FAMILIES: dict[str, tuple[Maker, int]] = {
    "models": (models, 500),
    "lessons": (lessons, 80),
    "reports": (reports, 160),
    "links": (links, 40),
    "grids": (grids, 50),
    "descriptions": (descriptions, 90),
    "full": (full, 80),
}

"""Bad inputs by seed: each maker fills a folder and returns the words of a command.

A maker is given `place` (an empty folder of its own), `chance` (its random numbers) and `stock` (things made once:
pictures, a run that was stopped, a backbone). What lies in `place/in` must not be changed by the command.
"""

from __future__ import annotations

import io
import os
import shutil
import string
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random

from fuzz_pictures import KINDS, add_oddity, damaged, encoded, picture

Maker = Callable[[Path, Random, Path], list[str]]
NAMES = (
    "cat",
    "dog house",
    "größe",
    "鳥",
    "🦊",
    "a_b",
    "A-B",
    "x" * 500,
    " ",
    "CAT",
    "train",
    "test",
    ".hidden",
    "don't",
    "a\nb",
)
ODD_VALUES = (
    "",
    " ",
    "-1",
    "0",
    "1",
    "2",
    "7",
    "1e6",
    "1e-400",
    "nan",
    "inf",
    "-inf",
    "true",
    "none",
    "None",
    "[]",
    "1,2",
    "{}",
    "é",
    "99999999999999999999",
    "0x10",
    "1_000",
    "a=b",
    "../..",
    "/",
    "\x00",
    "\n",
    "--",
    "-",
    "'",
    '"',
    "🦊",
    "seed:",
    "natural",
)


def pictures(place: Path, chance: Random, stock: Path) -> list[str]:
    """A folder dataset with bad pictures in it, or with bad class folders."""
    root = place / "in"
    shutil.copytree(stock / "pictures", root)
    for _ in range(chance.choice((1, 1, 2, 4))):
        kind = chance.randrange(8)
        folder = chance.choice(sorted(path.parent for path in root.rglob("0.png")))
        if kind < 4 and not folder.is_symlink():
            (folder / f"{chance.choice('012')}.png").write_bytes(chance.choice(KINDS)(chance))
        elif kind < 6:
            add_oddity(folder, chance)
        else:
            other = folder.parent / os.fsdecode(chance.choice(NAMES).encode()[:240])
            if os.path.lexists(other):
                continue
            other.mkdir()
            if chance.random() < 0.7:
                (other / "0.png").write_bytes(encoded(picture(chance), "PNG"))
    words = ["--data", "folder", "--data-root", str(root), "--increment", str(chance.choice((1, 2, 3)))]
    return ["run", "simplecil", *words, *chance.choice(([], ["--skip-broken"], ["--shots", "1"]))]


def flags() -> list[str]:
    return [
        "--data",
        "--data-root",
        "--data-options",
        "--tasks",
        "--increment",
        "--base",
        "--order",
        "--backbone",
        "--seed",
        "--shots",
        "--set",
        "--preset",
        "--no-preset",
        "--skip-broken",
        "--device",
        "--precision",
        "--out",
        "--resume",
        "--quiet",
        "--sed",
    ]


def options(place: Path, chance: Random, stock: Path) -> list[str]:
    """Options that do not exist, are misspelt, or have values of the wrong kind."""
    root = place / "in"
    shutil.copytree(stock / "pictures", root)
    words = [chance.choice(("simplecil", "zero-shot", "dmc-ott", "")), "--data", "folder", "--data-root", str(root)]
    for _ in range(chance.randint(1, 3)):
        words.append(chance.choice(flags()))
        if chance.random() < 0.85:
            words.append(chance.choice(ODD_VALUES))
    command = chance.choice(("run", "run", "run", "run", "methods", "bench", "rnu", "datasets"))
    if command == "bench":
        return ["bench", chance.choice(("table9", "table1")), "--data", "nothing", *words[-2:]]
    return [command, *words] if command == "run" else [command, *words[-2:]]


def settings(place: Path, chance: Random, stock: Path) -> list[str]:
    """`--set` with any key and any value."""
    root = place / "in"
    shutil.copytree(stock / "pictures", root)
    method, keys = chance.choice(
        (
            (
                "rapf",
                (
                    "adapter.epochs",
                    "adapter.lr",
                    "adapter.batch_size",
                    "adapter",
                    "ratio",
                    "adapter.optimizer",
                    "adapter.schedule",
                ),
            ),
            ("simplecil", ("x", "memory", "simplecil.lr", ".", "a.b.c")),
            (
                "dmc-ot",
                (
                    "stage1.epochs",
                    "stage1.lr",
                    "stage2.batch_size",
                    "beta",
                    "tuned",
                    "calibrate",
                    "stage1",
                    "stage1.milestones",
                ),
            ),
        )
    )
    quick = {
        "rapf": ["adapter.epochs=1"],
        "simplecil": [],
        "dmc-ot": ["stage1.epochs=0", "stage2.epochs=1", "stage2.steps=0"],
    }[method]
    bad = [f"{chance.choice(keys)}={chance.choice(ODD_VALUES)}" for _ in range(chance.choice((1, 1, 2)))]
    if chance.random() < 0.1:
        bad.append("noequals")
    return ["run", method, "--data", "folder", "--data-root", str(root), "--increment", "2", "--set", *quick, *bad]


def orders(place: Path, chance: Random, stock: Path) -> list[str]:
    """Files and words for the order of classes."""
    root = place / "in"
    shutil.copytree(stock / "pictures", root)
    names = sorted(path.name for path in (root / "train").iterdir())
    lines = chance.choice(
        (names, [str(i) for i in range(len(names))], [*names, names[0]], names[1:], ["9"], ["-1"], [])
    )
    chance.shuffle(lines)
    text = chance.choice(("\n", ",", "\r\n", " ")).join(lines).encode()
    (root / "order.txt").write_bytes(damaged(text, chance) if text and chance.random() < 0.5 else text)
    words = (
        "icarl",
        "seed:x",
        "seed:-1",
        "seed:99999999999",
        f"seed:{'9' * 30}",
        "seed:²",
        "nothing.txt",
        "",
        str(root),
    )
    order = str(root / "order.txt") if chance.random() < 0.7 else chance.choice(words)
    return ["run", "simplecil", "--data", "folder", "--data-root", str(root), "--order", order, "--increment", "2"]


def parquets(place: Path, chance: Random, stock: Path) -> list[str]:
    """CIFAR-100 files with other columns, other types, other labels, or damage."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = place / "in"
    root.mkdir()
    raw = encoded(picture(chance), "PNG")
    image: object = chance.choice(([{"bytes": raw, "path": "a"}] * 3, [raw] * 3, ["text"] * 3, [1.5] * 3, [None] * 3))
    label: object = chance.choice(
        ([0, 1, 2], [0, -1, 2], [0, None, 1], ["a", "b", None], [0.5, 1.0, 2.0], [10**12, 0, 1])
    )
    columns = {chance.choice(("img", "image", "x")): image, chance.choice(("fine_label", "label", "y")): label}
    if chance.random() < 0.3:
        columns["extra"] = chance.choice((image, label))
    metadata = chance.choice(
        (
            None,
            b"{",
            b"[]",
            b'{"info": 3}',
            b'{"info": {"features": {"label": {"names": 7}}}}',
            b'{"info": {"features": {"fine_label": {"_type": "ClassLabel", "names": ["a", "b", "c"]}}}}',
            b"\xff\xfe",
        )
    )
    table = pa.table(columns)
    if metadata is not None:
        table = table.replace_schema_metadata({b"huggingface": metadata})
    for split in ("train", "test"):
        path = root / f"{split}-00000.parquet"
        pq.write_table(table, path)
        if chance.random() < 0.4:
            path.write_bytes(damaged(path.read_bytes(), chance))
    return ["run", "simplecil", "--data", "cifar100", "--data-root", str(root)]


def archives(place: Path, chance: Random, stock: Path) -> list[str]:
    """CUB archives with paths that climb out, links, devices, or damage."""
    root = place / "in"
    root.mkdir()
    path = root / "CUB_200_2011.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for _ in range(chance.randint(0, 4)):
            name = chance.choice(
                (
                    "../up.txt",
                    "/abs.txt",
                    "CUB_200_2011/images.txt",
                    "a/../../b",
                    "CUB_200_2011/classes.txt",
                    "C:/x",
                    "ok",
                )
            )
            member = tarfile.TarInfo(name)
            member.type = chance.choice(
                (tarfile.REGTYPE, tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)
            )
            member.linkname = "/etc/passwd"
            member.mtime = chance.choice((0, -5, 2**40))
            body = chance.choice((b"1 a/b.jpg\n", b"1 ../../x\n", b"x", b"\xff", b""))
            member.size = len(body) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(body))
    if chance.random() < 0.4:
        path.write_bytes(damaged(path.read_bytes(), chance))
    return ["run", "simplecil", "--data", "cub200", "--data-root", str(chance.choice((root, path)))]


def resumes(place: Path, chance: Random, stock: Path) -> list[str]:
    """A run that was stopped, with damage to what it kept. If it succeeds it must be the same run."""
    run = place / "run"
    shutil.copytree(stock / "stopped", run)
    for _ in range(chance.choice((1, 1, 2))):
        path = chance.choice(sorted(path for path in run.rglob("*") if path.is_file() and path.name != ".lock"))
        kind = chance.randrange(8)
        if kind == 0:
            path.unlink()
        elif kind == 1:
            other = chance.choice(sorted(other for other in (stock / "other").rglob(f"*{path.suffix}")))
            path.write_bytes(other.read_bytes())
        elif kind == 2 and path.suffix == ".toml":
            lines = path.read_text().splitlines()
            lines[chance.randrange(len(lines))] = (
                f"{chance.choice(('seed', 'x', 'method', 'order'))} = {chance.choice(ODD_VALUES[:20])}"
            )
            path.write_text("\n".join(lines))
        else:
            path.write_bytes(damaged(path.read_bytes(), chance))
    return ["run", "--resume", str(run), *chance.choice(([], [], ["--seed", "3"], ["--set", "adapter.lr=0.5"]))]


def weights(place: Path, chance: Random, stock: Path) -> list[str]:
    """A backbone folder with a damaged, missing or foreign file."""
    root, backbone = place / "in", place / "in" / "backbone"
    shutil.copytree(stock / "pictures", root)
    shutil.copytree(stock / "backbone", backbone)
    path = chance.choice(sorted(path for path in backbone.iterdir() if path.is_file()))
    kind = chance.randrange(8)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.write_bytes(b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.")
    elif kind == 2 and path.suffix == ".json":
        text = path.read_text()
        digits = [i for i, letter in enumerate(text) if letter in string.digits]
        for _ in range(2):
            at = chance.choice(digits) if digits else 0
            text = text[:at] + chance.choice('0123456789-"ex') + text[at + 1 :]
        path.write_text(text)
    else:
        path.write_bytes(damaged(path.read_bytes(), chance))
    where = chance.choice((backbone, backbone, backbone, path))
    return [
        "run",
        "simplecil",
        "--data",
        "folder",
        "--data-root",
        str(root),
        "--increment",
        "3",
        "--backbone",
        str(where),
    ]


def places(place: Path, chance: Random, stock: Path) -> list[str]:
    """Folders for results that cannot or must not be written."""
    root = place / "in"
    shutil.copytree(stock / "pictures", root)
    (root / "file.txt").write_text("mine")
    (root / "mine").mkdir()
    (root / "mine" / "results.json").write_text("mine")
    (root / "link").symlink_to(root / "file.txt")
    (root / "locked").mkdir()
    (root / "locked" / ".lock").symlink_to(root / "file.txt")
    out = chance.choice(("file.txt", "mine", "link", "file.txt/below", "locked", "train", "x" * 300, "\0"))
    flag = chance.choice(("--out", "--out", "--out", "--resume"))
    return ["run", "simplecil", "--data", "folder", "--data-root", str(root), "--increment", "3", flag, f"{root}/{out}"]


FAMILIES: dict[str, tuple[Maker, int]] = {
    "pictures": (pictures, 300),
    "options": (options, 150),
    "settings": (settings, 150),
    "orders": (orders, 60),
    "parquet": (parquets, 70),
    "archives": (archives, 40),
    "resumes": (resumes, 120),
    "weights": (weights, 80),
    "places": (places, 30),
}
"""Each family and its share of a thousand."""

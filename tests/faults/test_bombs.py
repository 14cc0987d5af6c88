"""Small files made to take hours or all memory are refused at once, in one line, by the limits of `clipcil.limits`.

Version 0.2.0 has none of these limits: there every test fails, or its file takes the time and memory that its docstring
names (in full size; the files here are the smallest that show the limit).
"""

import io
import json
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import clipcil
from clipcil.classifier.folder import load_model, write_model
from clipcil.classifier.state import ModelState
from clipcil.clip import load_clip
from clipcil.clip.loading import MINI, read_safetensors
from clipcil.clip.tokenizer import Tokenizer
from clipcil.data.bombs import MeteredFile
from clipcil.data.dataset import open_dataset
from clipcil.data.pictures import decode
from clipcil.errors import UserError
from clipcil.limits import (
    LONGEST_SIDE,
    MOST_HEADER,
    MOST_NUMBERS,
    MOST_PICTURE,
    MOST_PLAIN,
    MOST_READS,
    MOST_SCANS,
    MOST_SEGMENTS,
)
from clipcil.methods.base import build_method
from clipcil.methods.registry import find_method
from clipcil.report.html import environment
from clipcil.serve.answers import Limits
from clipcil.serve.staging import Staging
from clipcil.settings import override
from clipcil.storage import read_json, read_toml, sha256
from clipcil.tensor_store import read_entry
from clipcil.training.device import make_fabric
from clipcil.training.trainer import Trainer
from support.errors import one_line
from support.lessons import plain
from support.towers import refused


def saved(kind: str, size: tuple[int, int] = (16, 16), **options: object) -> bytes:
    file = io.BytesIO()
    Image.new("P" if kind == "GIF" else "RGB", size).save(file, kind, **options)
    return file.getvalue()


def segments(count: int) -> bytes:
    """A JPEG with so many segments of EXIF: 180,000 of them, 3.6 MB, took 19 s."""
    jpeg = saved("JPEG")
    return jpeg[:2] + (b"\xff\xe1" + struct.pack(">H", 18) + b"Exif\0\0" + b"x" * 10) * count + jpeg[2:]


def scans(count: int, size: tuple[int, int] = (16, 16)) -> bytes:
    """A progressive JPEG with its last scan repeated: 1,200 scans of 7,000 × 7,000 pixels, 187 kB, took 62 s."""
    jpeg = saved("JPEG", size, progressive=True)
    return jpeg[:-2] + jpeg[jpeg.rindex(b"\xff\xda") : -2] * count + jpeg[-2:]


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def chunks(count: int) -> bytes:
    """A PNG with so many empty private chunks: 2,000,000, 24 MB, took 10 s."""
    png = saved("PNG")
    return png[:33] + chunk(b"prVt") * count + png[33:]


def pieces() -> bytes:
    """A PNG whose pixels come in pieces of a byte."""
    png, pixels = saved("PNG"), zlib.compress(bytes(600 * 601), 0)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 600, 600, 8, 0, 0, 0, 0))
    return png[:8] + header + b"".join(chunk(b"IDAT", pixels[i : i + 1]) for i in range(len(pixels))) + chunk(b"IEND")


def remarks(count: int) -> bytes:
    """A GIF with so many remarks."""
    gif = saved("GIF")
    return gif[: (at := gif.index(b",\0\0\0\0"))] + b"!\xfe\1x\0" * count + gif[at:]


def tiff(*tags: tuple[int, int, int, int], order: str = "<", big: bool = False, end: bytes = b"") -> bytes:
    """A TIFF of 16 × 16 grey pixels with more tags (number, type, count, value or place)."""
    every = [(256, 4, 1, 16), (257, 4, 1, 16), (258, 4, 1, 8), (259, 4, 1, 1), (262, 4, 1, 1), *tags]
    mark = (b"II" if order == "<" else b"MM") + struct.pack(order + "H", 43 if big else 42)
    head = mark + struct.pack(order + ("HHQQ" if big else "IH"), *((8, 0, 16, len(every)) if big else (8, len(every))))
    body = b"".join(struct.pack(order + ("HHQQ" if big else "HHII"), *tag) for tag in every)
    return head + body + bytes(8 if big else 4) + end


STRIPS = (273, 4, MOST_NUMBERS + 1, 8)
BOMBS = {
    "segments.jpg": (lambda: segments(MOST_SEGMENTS), "segments"),
    "scans.jpg": (lambda: scans(MOST_SCANS), "scans"),
    "fill.jpg": (lambda: b"\xff\xd8" + b"\xff" * 10**6 + saved("JPEG")[2:], "parts"),  # 30 MB took 10 s
    "junk.jpg": (lambda: segments(1)[:40] + bytes(10**6) + saved("JPEG")[2:], "parts"),
    "chunks.png": (lambda: chunks(MOST_READS // 2), "parts"),
    "pieces.png": (pieces, "parts"),
    "remarks.gif": (lambda: remarks(MOST_READS // 3), "parts"),
    "rows.ppm": (lambda: b"P5 1 200000 255\n" + bytes(200_000), "pixels"),  # 99 million rows took 10 s and 2.8 GB
    "columns.ppm": (lambda: b"P5 200000 1 255\n" + bytes(200_000), "pixels"),
    "digits.ppm": (lambda: b"P3 600 600 255\n" + b"1 " * (MOST_PLAIN // 2), "digits"),  # 54 MB took 10 s
    "remarks.pgm": (lambda: b"P2 8 8 255\n" + b"#\n" * 1000 + b"1 " * 64, "digits"),  # 1 MB of remarks took minutes
    "strips.tiff": (lambda: tiff(STRIPS), "numbers"),  # 20 million strips, 80 MB, took 8 GB
    "strips-mm.tiff": (lambda: tiff(STRIPS, order=">"), "numbers"),
    "strips-big.tiff": (lambda: tiff(STRIPS, big=True), "numbers"),
    "tile.tiff": (lambda: tiff((322, 4, 1, 30_000), (323, 4, 1, 30_000), (324, 4, 1, 8), (325, 4, 1, 9)), "pixels"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_picture_that_takes_too_long_is_refused_by_its_parts(name: str) -> None:
    make, said = BOMBS[name]
    with one_line(name, "too large", said):
        decode(make(), name)


@pytest.mark.parametrize(
    "whole",
    [
        segments(MOST_SEGMENTS - 20),
        scans(MOST_SCANS - 12) + b"\xff\xda" * 1000,  # phones append films to pictures
        chunks(1000),
        remarks(1000),
        b"P3 1 1 255\n# a remark\n1 2 3",
        tiff((273, 4, 1, 90), (279, 4, 1, 256), end=bytes(256)),
        saved("TIFF", compression="tiff_lzw"),
    ],
)
def test_a_picture_of_a_few_parts_more_than_usual_is_read(whole: bytes) -> None:
    assert decode(whole, "it").mode == "RGB"


def test_a_decoder_may_read_only_so_often() -> None:
    file = MeteredFile(bytes(10))
    for _ in range(MOST_READS):
        file.read(0)
    with pytest.raises(UserError, match="parts"):
        file.read(0)


@pytest.mark.parametrize("kind", ["WEBP", "AVIF", "JPEG"])
def test_a_long_file_is_refused_before_it_is_read(kind: str, tmp_path: Path) -> None:
    """A WebP of 16 × 16 pixels made 3 GiB long by `truncate` took 6.4 GB."""
    path = tmp_path / "long"
    path.write_bytes(saved(kind))
    with path.open("r+b") as file:
        file.truncate(MOST_PICTURE + 1)
    with one_line(str(path), "too large", "MiB"):
        decode(path, str(path))


JPEG2000 = saved("JPEG2000")


def test_jpeg_2000_is_read_only_where_a_dataset_asks_for_it(tmp_path: Path) -> None:
    """106 bytes that claim 7,000 × 7,000 pixels in blocks of 4 × 4 took 6.6 GB and 30 s."""
    with one_line("not a picture"):
        decode(JPEG2000, "it")
    assert Staging(tmp_path, Limits()).add("ant", "a.jp2", JPEG2000).broken, "the server has no such option"
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        for number in range(5):
            (tmp_path / name / f"{number}.jp2").write_bytes(JPEG2000)
    with one_line("no pictures"):
        open_dataset("folder", tmp_path)
    found = open_dataset("folder", tmp_path, {"jpeg2000": True})
    assert len(found.train) == 8 and found.train.subset(found.train.labels == 1).image(0).size == (16, 16)


@pytest.mark.parametrize(
    "text", ["[x" + ".y" * 200_000 + "]", "x" + ".y" * 5000 + " = 1", "a = {x" + ".y" * 5000 + " = 1}"]
)
def test_keys_of_thousands_of_parts_are_refused_at_once(text: str, tmp_path: Path) -> None:
    """The first took over a minute: the parser copies the key for each of its parts."""
    (tmp_path / "model.toml").write_text(text)
    with one_line("model.toml", "parts"):
        read_toml(tmp_path / "model.toml")


def test_texts_full_of_points_are_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("\n".join(f'a{number} = "{"." * 1000}"' for number in range(9)))
    assert len(read_toml(tmp_path / "x")) == 9


def test_a_json_file_of_millions_of_lists_is_refused_at_once(tmp_path: Path) -> None:
    """A results.json of 15 million, 45 MB, took 20 s and 1.5 GB."""
    (tmp_path / "results.json").write_text("[" + "[]," * 2_000_000 + "[]]")
    with one_line("results.json", "lists"):
        read_json(tmp_path / "results.json")


def test_names_cannot_turn_the_text_of_a_page_around() -> None:
    page = environment().from_string("<p>{{ name }}").render(name="a\u202eb\x1b<script>")
    assert page == "<p>a\\u202eb\\x1b&lt;script&gt;"


def safetensors(entries: int, length: int = 0) -> bytes:
    """A file of so many empty tensors: 1.2 million of them took 2 GB and 40 s."""
    table = {f"{number:x}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(entries)}
    header = json.dumps(table, separators=(",", ":")).encode()
    return struct.pack("<Q", max(length, len(header))) + header


@pytest.mark.parametrize("data", [safetensors(100_001), safetensors(0, MOST_HEADER + 1)])
def test_a_header_of_tensors_is_bounded(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    for read in (lambda: read_entry(path, sha256(path)), lambda: read_safetensors(path)):
        with one_line(str(path), "too many tensors"):
            read()


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("strata", {"random_features": 2_000_000}),
        ("ranpac", {"projections": 100_000}),
        ("coop", {"context_length": 10_000_000}),
        ("l2p", {"length": 100_000_000}),
    ],
)
def test_a_method_is_not_made_larger_than_its_stored_tensors(method: str, change: dict[str, int]) -> None:
    """2,000,000 random features in model.toml took all memory."""
    kind = find_method(method)
    clip, trainer = load_clip("mini"), Trainer(make_fabric("cpu", "32-true"))
    with one_line("settings"):
        build_method(
            kind, override(kind.Config(), change), clip, trainer, 0, state=({}, {"names": ["a"], "sizes": [1]})
        )


def tokenizer(folder: Path, *path: str, value: Any) -> Tokenizer:
    """The tokenizer of mini with another value at a place of its file."""
    table = json.loads((MINI / "tokenizer.json").read_text(encoding="utf-8"))
    inner = table
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (folder / "tokenizer.json").write_text(json.dumps(table), encoding="utf-8")
    return Tokenizer.from_folder(folder, 48)


GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.dropout", 0.5),  # texts were random, and nothing said so
        ("model.unk_token", "<|none|>"),
        ("model.continuing_subword_prefix", "x" * 10_000),  # the library panicked
        ("model.type", "Unigram"),
        ("model.vocab.a</w>", 8_000_000),
        ("model.vocab.a</w>", -1),
        ("model.vocab", {}),
        ("normalizer.normalizers", [GROWING] * 12),  # a text grew to 10¹² letters
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        ("normalizer", None),
        ("pre_tokenizer.pretokenizers", [{"type": "ByteLevel", "add_prefix_space": False}]),
        ("pre_tokenizer.pretokenizers", [{"type": "Split", "pattern": {"Regex": "(a+)+b"}}, {"type": "ByteLevel"}]),
        ("post_processor", {"type": "ByteLevel"}),
        ("added_tokens", [{"id": 3, "content": "cat", "special": True}]),
    ],
)
def test_a_tokenizer_of_other_parts_than_clips_is_refused(path: str, value: Any, tmp_path: Path) -> None:
    with one_line(str(tmp_path)):
        tokenizer(tmp_path, *path.split("."), value=value)


def test_a_token_that_the_tower_does_not_know_is_refused(tmp_path: Path) -> None:
    copy = shutil.copytree(MINI, tmp_path / "copy")
    tokenizer(copy, "model", "vocab", "a</w>", value=8192)
    refused(copy, "8193", "8192")


def test_a_long_tokenizer_is_refused_before_it_is_read(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "merges.txt", "vocab.json"):
        (tmp_path / name).write_bytes(b"{}")
    for name in ("tokenizer.json", "vocab.json"):
        with (tmp_path / name).open("r+b") as file:
            file.truncate(30 * 2**30)
        with one_line(name, "larger than"):
            Tokenizer.from_folder(tmp_path, 48)
        (tmp_path / name).unlink()


CONFIG, STEPS = "config.json", "preprocessor_config.json"


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    """A copy of the vision tower's files of mini without its trunk: the config is read before the weights."""
    folder = shutil.copytree(MINI, tmp_path / "copy", ignore=shutil.ignore_patterns("trunk.*"))
    config = json.loads((folder / CONFIG).read_text())
    config["vision_config"] |= {"num_channels": 3, "image_size": 64, "patch_size": 32}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("file", "values"),
    [
        (CONFIG, {"projection_dim": 0}),
        (CONFIG, {"vision_config": {"hidden_size": 0}}),
        (CONFIG, {"vision_config": {"image_size": 1_000_000}}),
        (CONFIG, {"vision_config": {"patch_size": 96}}),
        (STEPS, {"rescale_factor": 1e38}),
        (STEPS, {"image_std": [1e-45, 1, 1]}),
        (STEPS, {"image_mean": [1e38, 0, 0]}),
        (STEPS, {"size": {"shortest_edge": 5000}}),  # 3.4 GB for a picture of 3200 × 100
        (STEPS, {"size": {"shortest_edge": LONGEST_SIDE + 1}}),
    ],
)
def test_a_value_of_a_backbone_that_is_out_of_range_is_named(file: str, values: dict[str, Any], backbone: Path) -> None:
    path = backbone / file
    table = json.loads(path.read_text()) if path.exists() else {}
    [(key, value)] = values.items()
    if isinstance(value, dict):
        table[key] = {**table.get(key, {}), **value}
        [value] = value.values()
    else:
        table[key] = value
    path.write_text(json.dumps(table))
    refused(backbone, file, str(value[0] if isinstance(value, list) else value))


@pytest.mark.parametrize(
    ("factor", "kind", "said"),
    [
        (0.0, torch.float32, "same features"),
        (1e30, torch.float32, "not finite"),
        (1e300, torch.float64, "infinite"),
    ],
)
def test_weights_without_useful_features_are_refused(
    factor: float, kind: torch.dtype, said: str, tmp_path: Path
) -> None:
    """With weights of zero `learn` said "12 of 12 right"; with large ones some methods met a LinAlgError."""
    copy = shutil.copytree(MINI, tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    save_file({name: value.to(kind) * factor for name, value in weights.items()}, copy / "model.safetensors")
    refused(copy, str(copy), said)


def test_a_tie_is_no_right_answer(tmp_path: Path) -> None:
    model = clipcil.Classifier("simplecil")
    pictures = {"red": plain("red", "darkred"), "blue": plain("blue", "navy")}
    model.learn(pictures)
    model.save(tmp_path / "m")
    facts, tensors = load_model(tmp_path / "m")
    tensors["prototypes"][:] = tensors["prototypes"][0]
    write_model(tmp_path / "m", ModelState(facts, tensors))
    found = clipcil.load(tmp_path / "m").test(pictures)
    assert (found.right, found.pictures) == (0, 4)
    assert {(each.true, each.guess) for each in found.confused} == {("red", "blue"), ("blue", "red")}

# /// script
# requires-python = ">=3.11"
# dependencies = ["pillow==13.0.0", "pyarrow==26.0.1", "resvg-py==0.5.0"]
# ///
"""Make the embedded dataset: 100 nouns, each drawn in 8 styles by openly licensed emoji sets.

For maintainers; the package itself needs none of this. It needs `npm` (only to download the packages named below), and
the Python packages named above, so either install those or run it with a runner that reads the block above:

    python reproduce/make_emoji.py DOWNLOADS [--out src/clipcil/data/emoji]

Tarballs missing from the folder DOWNLOADS (190 MB together) are fetched by `npm pack name@version`. The versions are
pinned and nothing depends on time or order, so the same versions of the Python packages write the same bytes.
"""

import argparse
import io
import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import resvg_py
from PIL import Image

SIZE = 64


class Style(NamedTuple):
    """Where one style's drawings are: an npm package, and a member of its tarball for a code point."""

    name: str
    package: str
    version: str
    member: str
    """With {code}: the code point in lower-case hexadecimal, {CODE}: in upper case; without either: iconify's json."""


STYLES = (
    Style("noto", "emoji-datasource-google", "16.0.0", "img/google/64/{code}.png"),
    Style("noto-blob", "@iconify-json/noto-v1", "1.2.5", "icons.json"),
    Style("twemoji", "emoji-datasource-twitter", "16.0.0", "img/twitter/64/{code}.png"),
    Style("fluent-3d", "@lobehub/fluent-emoji-3d", "1.1.0", "assets/{code}.webp"),
    Style("fluent-flat", "@lobehub/fluent-emoji-flat", "1.1.0", "assets/{code}.svg"),
    Style("fluent-modern", "@lobehub/fluent-emoji-modern", "1.0.0", "assets/{code}.svg"),
    Style("openmoji", "openmoji", "17.0.0", "color/svg/{CODE}.svg"),
    Style("openmoji-black", "openmoji", "17.0.0", "black/svg/{CODE}.svg"),
)
_NOUNS = """
airplane 2708, ambulance 1f691, anchor 2693, ant 1f41c, apple 1f34e, backpack 1f392, balloon 1f388, banana 1f34c,
basketball 1f3c0, bathtub 1f6c1, bee 1f41d, bicycle 1f6b2, bread 1f35e, bus 1f68c, butterfly 1f98b, cactus 1f335,
camel 1f42a, camera 1f4f7, candle 1f56f, carrot 1f955, castle 1f3f0, cat 1f408, cheese 1f9c0, cherry 1f352,
church 26ea, computer 1f4bb, crab 1f980, crocodile 1f40a, crown 1f451, dog 1f415, dolphin 1f42c, drum 1f941,
duck 1f986, eggplant 1f346, elephant 1f418, fish 1f41f, fox 1f98a, frog 1f438, globe 1f30d, grape 1f347, guitar 1f3b8,
hamburger 1f354, hammer 1f528, helicopter 1f681, horse 1f40e, hourglass 231b, jeans 1f456, koala 1f428, ladybug 1f41e,
lemon 1f34b, lion 1f981, lipstick 1f484, locomotive 1f682, microphone 1f3a4, microscope 1f52c, monkey 1f412,
motorcycle 1f3cd, mushroom 1f344, octopus 1f419, owl 1f989, pancake 1f95e, panda 1f43c, peach 1f351, penguin 1f427,
pig 1f416, pineapple 1f34d, pizza 1f355, popcorn 1f37f, rabbit 1f407, ring 1f48d, rocket 1f680, rooster 1f413,
rose 1f339, sailboat 26f5, scissors 2702, scorpion 1f982, shark 1f988, sheep 1f411, ship 1f6a2, snail 1f40c,
snake 1f40d, snowman 26c4, spider 1f577, squirrel 1f43f, strawberry 1f353, sunflower 1f33b, taxi 1f695,
telephone 260e, telescope 1f52d, television 1f4fa, tent 26fa, tiger 1f405, tomato 1f345, tractor 1f69c, trumpet 1f3ba,
turtle 1f422, umbrella 2614, volcano 1f30b, watermelon 1f349, wrench 1f527
"""
CLASSES = dict(sorted(entry.split() for entry in _NOUNS.split(",")))
"""Nouns that every style draws, no two of them alike, with their code points; their order is that of the labels."""


def tarball(style: Style, folder: Path) -> Path:
    """The package's tarball in `folder`, downloaded first if it is not there."""
    path = folder / f"{style.package.lstrip('@').replace('/', '-')}-{style.version}.tgz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", f"{style.package}@{style.version}"], cwd=folder, check=True)
    return path


def read_json(path: Path, member: str) -> Any:
    """A JSON file out of a tarball."""
    with tarfile.open(path) as archive:
        stream = archive.extractfile(f"package/{member}")
        assert stream is not None
        return json.load(stream)


def check_owned(codes: set[str], path: Path, vendor: str) -> None:
    """emoji-datasource may fill a vendor's gaps with another's picture under another licence: refuse those."""
    flags = {entry["unified"].lower().removesuffix("-fe0f"): entry for entry in read_json(path, "emoji.json")}
    borrowed = sorted(code for code in codes if not flags[code][f"has_img_{vendor}"])
    if borrowed:
        raise SystemExit(f"{path.name}: {vendor} has no picture of its own for {borrowed}")


def drawings_by_code(style: Style, path: Path, codes: set[str]) -> dict[str, bytes]:
    """Code point to the file's bytes; a file may carry the variation selector fe0f in its name, or not."""
    wanted = {
        "package/" + style.member.format(code=full.lower(), CODE=full.upper()): code
        for code in codes
        for full in (code, f"{code}-fe0f")
    }
    found: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for entry in archive:
            if entry.name in wanted and (stream := archive.extractfile(entry)) is not None:
                found[wanted[entry.name]] = stream.read()
    return found


def drawings_by_name(style: Style, path: Path, titles: dict[str, str]) -> dict[str, bytes]:
    """The same out of an iconify collection, whose keys are the Unicode (CLDR) names with dashes."""
    collection = read_json(path, style.member)
    found: dict[str, bytes] = {}
    for code, title in titles.items():
        key = re.sub(r"[^a-z0-9]+", "-", title.lower())
        key = collection["aliases"].get(key, {}).get("parent", key)
        if icon := collection["icons"].get(key):
            width, height = icon.get("width", collection["width"]), icon.get("height", collection["height"])
            box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
            found[code] = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">{icon["body"]}</svg>'.encode()
    return found


def render(drawing: bytes) -> Image.Image:
    """A drawing (SVG, PNG or WebP) on white, 64×64 RGB, its aspect kept."""
    if drawing.lstrip()[:1] == b"<":
        # Drawn larger and reduced: the thin lines of the black style stay even.
        drawing = bytes(resvg_py.svg_to_bytes(svg_string=drawing.decode(), width=4 * SIZE, skip_system_fonts=True))
    picture = Image.open(io.BytesIO(drawing)).convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    picture = Image.alpha_composite(white, picture).convert("RGB")
    if picture.size == (SIZE, SIZE):
        return picture
    picture.thumbnail((SIZE, SIZE), Image.Resampling.LANCZOS)
    square = Image.new("RGB", (SIZE, SIZE), "white")
    square.paste(picture, ((SIZE - picture.width) // 2, (SIZE - picture.height) // 2))
    return square


def tested(label: int) -> set[str]:
    """The two styles of a class kept for the test. Over the classes every pair comes up, every style about equally."""
    count = len(STYLES)
    first = label % count
    second = (first + 1 + label // count % (count - 1)) % count
    return {STYLES[first].name, STYLES[second].name}


def collect(folder: Path) -> dict[tuple[str, str], Image.Image]:
    """All pictures by (class name, style name)."""
    openmoji = next(style for style in STYLES if style.package == "openmoji")
    listing = read_json(tarball(openmoji, folder), "data/openmoji.json")
    titles = {entry["hexcode"].lower().removesuffix("-fe0f"): entry["annotation"] for entry in listing}
    pictures: dict[tuple[str, str], Image.Image] = {}
    for style in STYLES:
        path, codes = tarball(style, folder), set(CLASSES.values())
        if style.package.startswith("emoji-datasource-"):
            check_owned(codes, path, style.package.removeprefix("emoji-datasource-"))
        if "{" in style.member:
            found = drawings_by_code(style, path, codes)
        else:
            found = drawings_by_name(style, path, {code: titles[code] for code in codes})
        if missing := [name for name, code in CLASSES.items() if code not in found]:
            raise SystemExit(f"{style.name} ({style.package}) has no drawing of: {', '.join(missing)}")
        pictures |= {(name, style.name): render(found[code]) for name, code in CLASSES.items()}
    return pictures


def write_parquet(pictures: dict[tuple[str, str], Image.Image], path: Path) -> None:
    """One file in the layout of the Hugging Face datasets library, class names in the schema's metadata."""
    names, rows = list(CLASSES), []
    for label, name in enumerate(names):
        for style in (style.name for style in STYLES):
            file = io.BytesIO()
            pictures[name, style].save(file, "PNG", optimize=True)
            image = {"bytes": file.getvalue(), "path": f"{name}/{style}.png"}
            split = "test" if style in tested(label) else "train"
            rows.append({"image": image, "label": label, "style": style, "split": split})
    features = {
        "image": {"_type": "Image"},
        "label": {"names": names, "_type": "ClassLabel"},
        "style": {"dtype": "string", "_type": "Value"},
        "split": {"dtype": "string", "_type": "Value"},
    }
    image_type, text = pa.struct([("bytes", pa.binary()), ("path", pa.string())]), pa.string()
    columns = [("image", image_type), ("label", pa.int64()), ("style", text), ("split", text)]
    schema = pa.schema(columns, metadata={"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, compression="zstd")
    print(f"{path}: {len(names)} classes × {len(STYLES)} styles, {path.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("downloads", type=Path, help="folder of the npm tarballs; missing ones are downloaded into it")
    parser.add_argument("--out", type=Path, default=Path("src/clipcil/data/emoji"), help="folder to write to")
    options = parser.parse_args()
    write_parquet(collect(options.downloads), options.out / "emoji.parquet")


if __name__ == "__main__":
    main()

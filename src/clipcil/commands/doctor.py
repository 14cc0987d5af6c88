"""`clipcil doctor`: whether everything that clipcil needs is there and works."""

import platform
import re
import sys
import tempfile
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

MODULES = {"pillow-heif": "pillow_heif", "scikit-learn": "sklearn"}
"""Modules of packages that have another name."""


def doctor() -> None:
    """Check the installation: versions, device, processor, cache folder, extras, and a short lesson.

    It prints a line for each. The exit code is 1 if something does not work.

    For example:
      clipcil doctor
    """
    broken = False
    for check in (python, torch, device, threads, processor, cache, extras, lesson):
        try:
            line = f"ok      {check.__name__}: {check()}"
        except Exception as error:  # whatever is broken: the other checks go on
            line, broken = f"FAILED  {check.__name__}: {type(error).__name__}: {' '.join(str(error).split())}", True
        print(line, flush=True)
    if broken:
        sys.exit(1)


def python() -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def torch() -> str:
    return f"{metadata.version('torch')}, lightning-fabric {metadata.version('lightning-fabric')}"


def device() -> str:
    import torch

    from clipcil.training.device import find_device

    matrix = torch.ones(8, 8, device=find_device("auto"))
    return f"{(matrix @ matrix).device}{f' ({torch.cuda.get_device_name()})' if matrix.is_cuda else ''}"


def threads() -> str:
    import torch

    return str(torch.get_num_threads())


def processor() -> str:
    import torch

    from clipcil.training.device import CPUINFO

    flags = set(CPUINFO.read_text().split()) if CPUINFO.is_file() else set()
    known = sorted(flags & {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd"})
    return f"torch uses {torch.backends.cpu.get_cpu_capability()}; features: {', '.join(known) or 'unknown'}"


def cache() -> str:
    from clipcil.storage import cache_folder, need_writable, walk
    from clipcil.tensor_store import TensorStore

    folder, shared = cache_folder(), TensorStore.of_user()
    need_writable(folder / "a file")
    size = sum((place / name).lstat().st_size for place, names in walk(folder) for name in names)
    kept = f"{shared.held_bytes() / 1e6:.0f} of at most {shared.most_bytes / 1e6:.0f} MB are features and stages"
    return f"{folder}, {size / 1e6:.0f} MB; {kept}"


def extras() -> str:
    found: dict[str, list[str]] = {}
    for line in metadata.requires("clipcil") or ():
        package, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"](\w+)['\"]", line)
        if package and extra and extra[1] not in ("test", "docs", "fuzz"):
            found.setdefault(extra[1], []).append(MODULES.get(package[0].lower(), package[0]))
    have = [extra for extra, modules in found.items() if all(map(find_spec, modules))]
    return f"{', '.join(have) or 'none'}; not installed: {', '.join(sorted(found.keys() - {*have})) or 'none'}"


def lesson() -> str:
    """A lesson of two classes, saved, loaded and tested."""
    from PIL import Image

    import clipcil

    started, colours = time.perf_counter(), ("red", "blue")
    taught, asked = ({name: [Image.new("RGB", (side, side), name)] for name in colours} for side in (40, 50))
    model = clipcil.Classifier("simplecil")
    model.learn(taught)
    with tempfile.TemporaryDirectory() as place:
        model.save(Path(place) / "model")
        accuracy = clipcil.load(Path(place) / "model").score(asked)
    if accuracy < 1:
        raise RuntimeError(f"the accuracy on red and blue pictures is {accuracy:.0%}")
    return f"learnt, saved, loaded and tested in {time.perf_counter() - started:.1f} s"

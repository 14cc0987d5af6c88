"""`load_clip`: a backbone by name, folder, file or hub id. Its files may come from strangers.

Tensors are read from safetensors, and by `openai` from the one other format. Only safetensors are fetched from the hub
(except from OpenAI's own repositories), and nothing in offline mode.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from PIL import Image
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from clipcil.clip import openai
from clipcil.clip.config import CLIPConfig, VisionConfig
from clipcil.clip.model import CLIP
from clipcil.clip.preprocess import Preprocess, Steps
from clipcil.clip.tokenizer import FILES, Tokenizer
from clipcil.clip.trunk import Trunk
from clipcil.errors import UserError, first_line
from clipcil.network import ASK_FIRST, downloads_allowed
from clipcil.settings import typed
from clipcil.storage import read_json
from clipcil.tensor_store import check_header

T = TypeVar("T")
MINI = Path(__file__).parent / "mini"
MINI_1 = "cf5c7e696f30/237319a126c6"
"""Fingerprints (weights/preprocessing) of version 1 of `mini`, which clipcil 0.1 shipped."""
OPENAI_REPOSITORY = "openai/clip-vit-base-patch16"
INDEX = "model.safetensors.index.json"
WEIGHTS = ("model.safetensors", INDEX, "pytorch_model.bin", "open_clip_model.safetensors", "ViT-*.pt")
"""Files of weights in a folder, in the order in which they are looked for."""
BY_HAND = f"put config.json, model.safetensors and {FILES} in a folder and give its path as the backbone"
HUB_ID = re.compile(r"(hf-hub:)?[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
"""owner/name or owner/name@revision, open_clip's `hf-hub:` before it allowed."""


def backbone_name(backbone: object) -> str:
    """The name of a backbone given by name, by path or as a loaded `CLIP`."""
    if isinstance(backbone, CLIP):
        return backbone.name
    if isinstance(backbone, Path):
        return "./mini" if backbone == Path("mini") else str(backbone)  # a folder, not the embedded one
    if isinstance(backbone, str):
        return backbone
    raise UserError(f"backbone is of type {type(backbone).__name__}; give a name, a path or a CLIP")


def load_clip(name: str | Path = "mini") -> CLIP:
    """Load a backbone: a frozen CLIP in evaluation mode, in float32.

    Args:
        name: One of
            "mini": the backbone shipped with the package;
            a folder: Hugging Face's layout (config.json, model.safetensors, tokenizer), or open_clip's;
            a .safetensors file: its config and tokenizer beside it;
            a .pt file: OpenAI's ViT-B-16.pt, the tokenizer beside it;
            a hub id: "openai/clip-vit-base-patch16", "laion/CLIP-ViT-B-16-laion2B-s34B-b88K"; with
            "@revision" behind it, that commit, tag or branch.

    Raises:
        UserError: There is no such backbone, or its files are damaged.

    Examples:
        >>> import clipcil
        >>> clip = clipcil.load_clip("mini")
        >>> clip.encode_texts(["a photo of a cat.", "a photo of a dog."]).shape
        torch.Size([2, 384])
    """
    name = backbone_name(name)
    path = MINI if name == "mini" else Path(name).expanduser()
    is_weights = path.suffix in (".pt", ".safetensors")
    if path.is_dir():
        found = [file for pattern in WEIGHTS for file in sorted(path.glob(pattern))]
        if not found:
            raise UserError(
                f"no backbone in {path}: put config.json, model.safetensors and the tokenizer ({FILES}) there"
            )
        return _from_file(found[0], name)
    if path.is_file():
        if not is_weights:
            raise UserError(f"{path}: a backbone file ends in .safetensors or .pt, or is a folder")
        return _from_file(path, name)
    if HUB_ID.fullmatch(name) and not is_weights:
        weights = download(name)
        clip = _from_file(weights, name)
        clip.pinned = pinned(name, weights)
        return clip
    raise UserError(f"no backbone '{name}': not 'mini', a folder, a .pt or .safetensors file, or a hub id owner/name")


def _from_file(path: Path, name: str) -> CLIP:
    """The backbone with the weights in `path` and its other files beside it."""
    folder = path.parent
    tensors = read_safetensors(path) if path.suffix in (".safetensors", ".json") else openai.read_checkpoint(path)
    if openai.looks_like(tensors):
        settings: dict[str, Any] = {}
        if path.suffix == ".pt":  # a state dict saved as .pt counts as OpenAI's, which trained with QuickGELU
            settings = {"model_cfg": {"quick_gelu": True}}
        elif (folder / openai.OPEN_CLIP_CONFIG).is_file():
            settings = _read(folder / openai.OPEN_CLIP_CONFIG, dict)
        with _errors_name(f"'{name}' (weights and {openai.OPEN_CLIP_CONFIG})"):
            tensors = openai.rename(tensors)
            config = openai.make_config(settings, tensors, name)
            preprocess = Preprocess(openai.make_steps(settings, config.vision.image_size))
        tokenizer = openai_tokenizer(folder, config.text.context)
    else:
        config = _read(folder / "config.json", CLIPConfig.from_hf)
        preprocess = _preprocess(folder, config.vision)
        tokenizer = Tokenizer.from_folder(folder, config.text.context)
    if tokenizer.vocab > config.text.vocab:
        raise UserError(
            f"the tokenizer of '{name}' has {tokenizer.vocab} tokens, the text tower {config.text.vocab}; "
            "take tokenizer and weights from the same backbone"
        )
    # Old config.json files say bos 0, eos 2, pad 1, which is wrong; the tokenizer knows.
    text = replace(config.text, bos=tokenizer.bos, eos=tokenizer.eos, pad=tokenizer.eos)
    with torch.device("meta"):  # no time spent on random weights
        clip = CLIP(replace(config, text=text), tokenizer, preprocess, name)
    ours = {key.partition(".")[2]: key for key in clip.state_dict()}  # without "vision." or "text." before them
    set_weights(clip, {ours.get(key, key): value for key, value in tensors.items()}, f"'{name}'")
    clip.freeze()
    with _errors_name(f"weights and config of '{name}'"):
        _try_out(clip)
    return clip


@torch.no_grad()
def _try_out(clip: CLIP) -> None:
    """Refuse a backbone whose features of two pictures, or of two texts, are not finite or do not differ."""
    pixels = clip.preprocess([Image.linear_gradient("L"), Image.radial_gradient("L")])
    seen, texts = clip.vision(pixels, class_only=True), clip.encode_texts(["a", "photo"])
    if not all(bool(each.isfinite().all()) for each in (seen.features, seen.levels, texts, clip.scale)):
        raise UserError("features are not finite; copy its files again")
    if torch.equal(seen.features[0], seen.features[1]) or torch.equal(texts[0], texts[1]):
        raise UserError("all pictures or all texts have the same features; copy its files again")


def _preprocess(folder: Path, config: VisionConfig) -> Preprocess:
    """As `trunk.json` or `preprocessor_config.json` says, or CLIP's own."""
    side, file = config.image_size, folder / "preprocessor_config.json"
    if not (folder / "trunk.json").is_file():
        steps = _read(file, lambda raw: Steps.from_hf(raw, side)) if file.is_file() else Steps.plain(side)
        if config.channels != 3:
            raise UserError(f"{folder} reads {config.channels} channels, pictures have 3; its trunk.json is missing")
        return Preprocess(steps)
    with torch.device("meta"):
        steps, trunk = _read(folder / "trunk.json", lambda spec: (Steps.from_trunk(spec), Trunk(spec)))
    set_weights(trunk, read_safetensors(folder / "trunk.safetensors"), str(folder / "trunk.safetensors"))
    preprocess = Preprocess(steps, trunk.eval().requires_grad_(False))
    places = trunk.output_shape(steps.crop[0])[-1]
    if (trunk.channels, places) != (config.channels, side):
        made, wanted = f"{trunk.channels}×{places}×{places}", f"{config.channels}×{side}×{side}"
        raise UserError(f"{folder}: trunk.json makes {made} numbers of a picture, config.json wants {wanted}")
    return preprocess


def _read(path: Path, make: Callable[[dict[str, Any]], T]) -> T:
    """`make` of the JSON object in a file of a backbone."""
    table: dict[str, Any] = typed(read_json(path, links=True), dict[str, Any], str(path))
    with _errors_name(path):
        return make(table)


@contextmanager
def _errors_name(source: object) -> Iterator[None]:
    """Turn errors caused by impossible values in a file into a `UserError` that names the file."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        found = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{source} is damaged ({found}); copy it again") from error


def set_weights(module: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Put `tensors`, which must be all of its own and finite, into `module` (on any device) as float32."""
    ready, wanted = {}, module.state_dict()
    for name, tensor in tensors.items():
        if name.endswith("position_ids"):  # old files have them
            continue
        if not tensor.is_floating_point() or tensor.element_size() < 2:  # float8 too: torch cannot compute with it
            raise UserError(f"weights of {source}: '{name}' is {tensor.dtype}; quantised weights are not read")
        ready[name] = tensor.detach()
        if name in wanted and tensor.shape == wanted[name].shape:  # others are refused below, whatever their size
            ready[name] = tensor.detach().to(torch.float32).contiguous()
            if not bool(torch.isfinite(ready[name]).all()):
                raise UserError(f"weights of {source}: '{name}' holds NaN or infinite values; the file is damaged")
    try:
        module.load_state_dict(ready, assign=True)
    except RuntimeError as error:  # torch lists the faults below a heading; one with two shapes is long
        wrong = str(error).partition("\n")[2].strip().partition("\n")[0][:300]
        raise UserError(f"weights of {source}: {wrong} Wrong config, or half a file?") from error


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of the shards an `…index.json` names."""
    if path.suffix == ".json":
        return {name: tensor for shard in shards(path) for name, tensor in read_safetensors(shard).items()}
    try:
        check_header(path, links=True)  # the hub's cache has links
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is missing or damaged, or not safetensors ({first_line(error)})") from error


def shards(index: Path) -> list[Path]:
    """The safetensors files that `index` names, always beside it: folders before their names are ignored."""
    Names = dict[str, Annotated[str, Field(pattern=r"\.safetensors$")]]
    files = _read(index, lambda table: typed(table["weight_map"], Names))
    return [index.parent / name for name in sorted({Path(file).name for file in files.values()})]


def pinned(name: str, weights: Path) -> str:
    """`owner/name` with the commit of the weights that `download` found: `owner/name@0a1b…`."""
    known = "@" in name or weights.parent.parent.name != "snapshots"
    return name if known else f"{name}@{weights.parent.name}"


def download(name: str) -> Path:
    """The weights of a hub repository, in the cache; its config, tokenizer and preprocessing are beside them.

    `owner/name@revision` names a commit, a tag or a branch; the default is the newest commit of the main branch.
    """
    repository = name.removeprefix("hf-hub:")
    layouts = [("config.json", "model.safetensors"), ("config.json", INDEX)]
    if repository.startswith("openai/"):  # some of its own have no safetensors; the file is read as tensors only
        layouts.append(("config.json", "pytorch_model.bin"))
    layouts.append((openai.OPEN_CLIP_CONFIG, "open_clip_model.safetensors"))
    found = (_hub_file(repository, file) for config, file in layouts if _hub_file(repository, config))
    weights = next(filter(None, found), None)
    if weights is None:
        if not downloads_allowed():
            raise UserError(f"'{repository}' is not on this machine; {ASK_FIRST}")
        raise UserError(f"hub repository '{repository}' has no safetensors weights of a CLIP; {BY_HAND}")
    parts = [shard.name for shard in shards(weights)] if weights.name == INDEX else []
    for file in (*parts, "tokenizer.json", "vocab.json", "merges.txt", "preprocessor_config.json"):
        _hub_file(repository, file)
    return weights


def openai_tokenizer(folder: Path, context: int) -> Tokenizer:
    """OpenAI's vocabulary, which its own and open_clip's files leave out: from beside the weights, else the hub."""
    if not (folder / "tokenizer.json").is_file() and not (folder / "vocab.json").is_file():
        found = None
        with suppress(UserError):
            found = _hub_file(OPENAI_REPOSITORY, "tokenizer.json")
        if found is None:
            where = folder.resolve()
            raise UserError(f"no tokenizer beside the weights: put {FILES} of {OPENAI_REPOSITORY} in {where}")
        folder = found.parent
    return Tokenizer.from_folder(folder, context)


def _hub_file(repository: str, file: str) -> Path | None:
    """A file of `owner/name[@revision]`, from the cache or the hub; None where the repository has none."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repository, _, named = repository.partition("@")
    revision = named or None
    try:
        if not downloads_allowed():  # hf_hub_download(local_files_only=True) would still ask the hub something else
            found = try_to_load_from_cache(repository, file, revision=revision)
            return Path(found) if isinstance(found, str) else None
        return Path(hf_hub_download(repository, file, revision=revision))
    except Exception as error:  # gated, misspelt, no network: the library has a class for each
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        raise UserError(f"cannot get {file} of '{repository}' from the hub ({first_line(error)}); {BY_HAND}") from error

"""`load_clip`: a backbone by name, folder, file or hub id.

From the hub come safetensors only (OpenAI's own repositories excepted), and nothing in offline mode.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from clipcil.clip import open_clip, openai
from clipcil.clip.config import CLIPConfig
from clipcil.clip.model import CLIP
from clipcil.clip.preprocess import Preprocess, Steps
from clipcil.clip.tokenizer import FILES, Tokenizer
from clipcil.clip.trunk import Trunk
from clipcil.clip.weights import fill, read_json, read_safetensors, shard_names
from clipcil.errors import UserError, first_line
from clipcil.network import ASK_FIRST, downloads_allowed
from clipcil.storage import is_file, is_folder

MINI = Path(__file__).parent / "mini"
MINI_1 = "cf5c7e696f30/237319a126c6"
"""Fingerprints (weights/preprocessing) of version 1 of `mini`, which clipcil 0.1 shipped."""
OPENAI_REPOSITORY = "openai/clip-vit-base-patch16"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt")
_HF_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


def backbone_name(backbone: object) -> str:
    """The name of a backbone that is given by name, by path or as a loaded `CLIP`.

    Raises:
        UserError: It is none of these.
    """
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

    Example:
        >>> import clipcil
        >>> clip = clipcil.load_clip("mini")
        >>> clip.encode_texts(["a photo of a cat.", "a photo of a dog."]).shape
        torch.Size([2, 384])
    """
    name = backbone_name(name)
    if name == "mini":
        return _from_folder(MINI, name)
    path = Path(name).expanduser()
    if is_folder(path):
        return _from_folder(path, name)
    if is_file(path):
        return _from_file(path, name)
    if is_hub_id(name) and path.suffix not in (".pt", ".safetensors"):
        folder = download(name)
        clip = _from_folder(folder, name)
        clip.pinned = pinned(name, folder)
        return clip
    raise UserError(f"no backbone '{name}': not 'mini', a folder, a .pt or .safetensors file, or a hub id owner/name")


def _from_folder(folder: Path, name: str) -> CLIP:
    weights = next((folder / file for file in _HF_WEIGHTS if (folder / file).is_file()), None)
    if (folder / "config.json").is_file() and weights is not None:
        tensors = openai.read_checkpoint(weights) if weights.suffix == ".bin" else read_safetensors(weights)
        if not openai.looks_like(tensors):
            return _hugging_face(folder, name, tensors)
    for file in open_clip.WEIGHTS:
        if (folder / file).is_file():
            return _openai_names(read_safetensors(folder / file), folder, name, open_clip.read_config(folder))
    archives = sorted(folder.glob("ViT-*.pt"))
    if archives:
        return _from_file(archives[0], name)
    raise UserError(f"no backbone in {folder}: put config.json, model.safetensors and the tokenizer ({FILES}) there")


def _from_file(path: Path, name: str) -> CLIP:
    if path.suffix == ".safetensors":
        tensors = read_safetensors(path)
        if not openai.looks_like(tensors):
            return _hugging_face(path.parent, name, tensors)
        return _openai_names(tensors, path.parent, name, open_clip.read_config(path.parent))
    if path.suffix == ".pt":
        # OpenAI trained with QuickGELU; a state dict saved as .pt counts as OpenAI's.
        return _openai_names(openai.read_checkpoint(path), path.parent, name, {"model_cfg": {"quick_gelu": True}})
    raise UserError(f"{path}: a backbone file ends in .safetensors or .pt, or is a folder")


def _hugging_face(folder: Path, name: str, tensors: dict[str, Tensor]) -> CLIP:
    config = CLIPConfig.from_hf(read_json(folder / "config.json"))
    tokenizer = Tokenizer.from_folder(folder, config.text.context)
    if (folder / "trunk.json").is_file():
        preprocess = _with_trunk(folder, config)
    elif (folder / "preprocessor_config.json").is_file():
        raw = read_json(folder / "preprocessor_config.json")
        with _whole(folder / "preprocessor_config.json"):
            preprocess = Preprocess(Steps.from_hf(raw, config.vision.image_size))
    else:
        preprocess = Preprocess(Steps.plain(config.vision.image_size))
    return _assemble(config, tokenizer, preprocess, name, tensors)


def _openai_names(tensors: dict[str, Tensor], folder: Path, name: str, raw: dict[str, object]) -> CLIP:
    with _whole(f"'{name}' (weights and {open_clip.CONFIG})"):
        renamed = openai.to_hf(tensors)
        config = open_clip.make_config(raw, renamed, name)
        preprocess = Preprocess(open_clip.make_steps(raw, config.vision.image_size))
    return _assemble(config, openai_tokenizer(folder, config.text.context), preprocess, name, renamed)


@contextmanager
def _whole(source: object) -> Iterator[None]:
    """What files with impossible values lead to, as one line that names them: they come from the net."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        found = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{source} is not whole ({found}); copy it again") from error


def _with_trunk(folder: Path, config: CLIPConfig) -> Preprocess:
    spec = read_json(folder / "trunk.json")
    with _whole(folder / "trunk.json"), torch.device("meta"):
        steps, trunk = Steps.from_trunk(spec), Trunk(spec)
    fill(trunk, read_safetensors(folder / "trunk.safetensors"), str(folder / "trunk.safetensors"))
    trunk.eval().requires_grad_(False)
    vision, side = config.vision, config.vision.image_size
    if trunk.side(steps.crop[0]) != side:
        raise UserError(
            f"{folder / 'trunk.json'} makes {trunk.side(steps.crop[0])} places a side, config.json wants {side};"
            " take both files from the same backbone"
        )
    return Preprocess(steps, trunk, (vision.channels + trunk.packed(side, side), side, side))


def _assemble(
    config: CLIPConfig, tokenizer: Tokenizer, preprocess: Preprocess, name: str, tensors: dict[str, Tensor]
) -> CLIP:
    if tokenizer.vocab > config.text.vocab:
        raise UserError(
            f"the tokenizer of '{name}' has {tokenizer.vocab} tokens, the text tower {config.text.vocab}; "
            "take tokenizer and weights from the same backbone"
        )
    if preprocess.trunk is None and preprocess.shape[0] != config.vision.channels:
        raise UserError(f"'{name}' reads {config.vision.channels} channels, pictures have 3; its trunk.json is missing")
    # Old config.json files say bos 0, eos 2, pad 1, which is wrong; the tokenizer knows.
    text = replace(config.text, bos=tokenizer.bos, eos=tokenizer.eos, pad=tokenizer.eos)
    with torch.device("meta"):  # no time spent on random weights
        clip = CLIP(replace(config, text=text), tokenizer, preprocess, name)
    towers = _Towers(clip)
    fill(towers, tensors, f"weights of '{name}'")
    clip.vision.inner = preprocess.trunk.inner_sizes if preprocess.trunk is not None else ()
    clip.logit_scale = towers.logit_scale  # the one tensor that is no member of a shared submodule
    return clip.freeze()


class _Towers(torch.nn.Module):
    """The towers under Hugging Face's names: `vision_model.*`, `visual_projection.weight`, …, `logit_scale`."""

    def __init__(self, clip: CLIP) -> None:
        super().__init__()
        self.vision_model, self.visual_projection = clip.vision.vision_model, clip.vision.visual_projection
        self.text_model, self.text_projection = clip.text.text_model, clip.text.text_projection
        self.logit_scale = clip.logit_scale


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form owner/name or owner/name@revision; open_clip's `hf-hub:` before it is allowed."""
    return _ID.fullmatch(name.removeprefix("hf-hub:")) is not None


def pinned(name: str, folder: Path) -> str:
    """`owner/name` with the commit that `folder`, found by `download`, is of: `owner/name@0a1b…`."""
    commit = folder.name if folder.parent.name == "snapshots" else ""
    return name if "@" in name or not commit else f"{name}@{commit}"


def download(name: str) -> Path:
    """The folder of the cache that holds the repository's weights, config, tokenizer and preprocessing.

    `owner/name@revision` names a commit, a tag or a branch; without one it is the newest commit of the main branch.
    """
    repository = name.removeprefix("hf-hub:")
    config = _hub_file(repository, "config.json")
    weights = _hub_file(repository, "model.safetensors") if config else None
    if config and not weights and (index := _hub_file(repository, "model.safetensors.index.json")):
        for shard in shard_names(index):
            weights = _hub_file(repository, shard)
    if config and not weights and repository.startswith("openai/"):
        # Some of OpenAI's own repositories have no safetensors. The file is read as tensors only (see `openai`).
        weights = _hub_file(repository, "pytorch_model.bin")
    if not weights:
        config = _hub_file(repository, open_clip.CONFIG)
        weights = config and _hub_file(repository, open_clip.WEIGHTS[0])
    if not weights or not config:
        if not downloads_allowed():
            raise UserError(f"'{repository}' is not on this machine; {ASK_FIRST}")
        raise UserError(f"hub repository '{repository}' has no safetensors weights of a CLIP; {_by_hand()}")
    for file in (*_TOKENIZER_FILES, "preprocessor_config.json"):
        _hub_file(repository, file)
    return weights.parent


def openai_tokenizer(folder: Path, context: int) -> Tokenizer:
    """OpenAI's vocabulary, which its own and open_clip's files leave out: from beside the weights, else the hub."""
    if (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file():
        return Tokenizer.from_folder(folder, context)
    try:
        found = _hub_file(OPENAI_REPOSITORY, "tokenizer.json")
    except UserError:
        found = None
    if found is None:
        raise UserError(f"no tokenizer beside the weights: put {FILES} of {OPENAI_REPOSITORY} in {folder.resolve()}")
    return Tokenizer.from_folder(found.parent, context)


def _hub_file(repository: str, file: str) -> Path | None:
    """A file of `owner/name[@revision]`, from the cache or the hub; None where the repository has none."""
    repository, _, revision = repository.partition("@")
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        if not downloads_allowed():  # hf_hub_download(local_files_only=True) would still ask the hub something else
            found = try_to_load_from_cache(repository, file, revision=revision or None)
            return Path(found) if isinstance(found, str) else None
        return Path(hf_hub_download(repository, file, revision=revision or None))
    except LocalEntryNotFoundError as error:
        raise UserError(f"cannot get {file} of '{repository}' from the hub; {_by_hand()}") from error
    except EntryNotFoundError:
        return None
    except Exception as error:  # gated, misspelt, no network: the library has a class for each
        raise UserError(f"cannot get '{repository}' from the hub ({first_line(error)}); {_by_hand()}") from error


def _by_hand() -> str:
    return f"put config.json, model.safetensors and {FILES} in a folder and give its path as the backbone"

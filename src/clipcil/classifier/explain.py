"""Why a model names a class: a heat map over the picture, and the most similar picture that is kept of the class.

    heat = Π_l (Σ_channels ReLU(h_l ∂s/∂h_l))^(1/L),    s = z_c − log Σ_{c' ≠ c} exp z_c'

h_l are maps at a few depths of the network and z the logits: to first order, h ∂s/∂h is what a place adds to the lead s
of the class over all others (gradient times activation). It takes one pass forward and one back, and nothing of the
method is read but its logits.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, PngImagePlugin
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, interpolate

from clipcil.classifier.scoring import Calibration
from clipcil.clip.preprocess import Steps
from clipcil.data.pictures import decode, decode_and
from clipcil.data.reader import TensorBatch
from clipcil.data.sources import as_picture
from clipcil.errors import UserError
from clipcil.methods.base import Method
from clipcil.storage import write_bytes

DEPTHS = 4
"""Maps of a tower without a trunk: what its last blocks read."""
SIDE = 384
"""Longer side of the picture that is shown, in pixels."""
COLOURS = (0.0, 0.5, 1.0), ((254, 217, 118), (253, 141, 60), (189, 0, 38))
"""Places on the scale of the heat, and their colours; the darkest speaks most for the class."""
GAP = 8
"""Pixels between two pictures."""
MADE_BY = "clipcil predict --explain"
"""Text in every PNG: a file without it belongs to the user."""


@dataclass(frozen=True)
class Explanation:
    """Which parts of a picture speak for a class, and the most similar picture that the model keeps of the class."""

    name: str
    """The class."""
    probability: float
    similar: bytes | None
    """The most similar kept picture of the class, as a JPEG file; None where no small pictures are kept."""
    picture: Image.Image
    """The picture, its longer side `SIDE` pixels."""
    heat: np.ndarray
    """(height, width) of `picture`: from 0 to 1, how much each place speaks for the class; 0 where the backbone does
    not look."""

    @property
    def png(self) -> bytes:
        """The picture in grey under its heat, as a PNG file."""
        return _png([self._overlay()])

    def save(self, path: str | Path) -> None:
        """Write a PNG: the picture, its heat, and the most similar kept picture where there is one."""
        panels = [self.picture, self._overlay()]
        if self.similar is not None:
            similar, high = decode(self.similar, "the kept picture"), self.picture.height
            panels.append(similar.resize((max(1, high * similar.width // similar.height), high)))
        write_bytes(Path(path), _png(panels))

    def _overlay(self) -> Image.Image:
        grey = np.asarray(self.picture.convert("L"), dtype=np.float64)[..., None]
        places, colours = COLOURS
        colour = np.stack([np.interp(self.heat, places, channel) for channel in zip(*colours, strict=True)], axis=-1)
        cover = 0.8 * self.heat[..., None]
        return Image.fromarray((grey * (1 - cover) + colour * cover).round().astype(np.uint8))


def explain(
    method: Method, how: Calibration, picture: Any, label: int | None, names: Sequence[str], kept: Sequence[list[bytes]]
) -> Explanation:
    """Explain why a picture is, or would be, one of the classes.

    Args:
        method: A method that has learnt classes.
        how: Calibration of its scores.
        picture: As for `Classifier.predict`.
        label: The class; None: the likeliest.
        names: Names of the classes.
        kept: The small pictures of each class, as JPEG files.
    """
    preprocess = method.clip.preprocess
    image = decode_and(as_picture(picture), "the picture", Image.Image.copy)
    pixels = preprocess.picture(image)[None].to(method.device).requires_grad_()
    with torch.enable_grad(), _maps(method) as maps:
        trunk = None if preprocess.trunk is None else preprocess.trunk.to(method.device)
        batch = TensorBatch(method.clip, pixels if trunk is None else trunk.whole(pixels))
        logits = method.logits(batch)[0].double() * how.temperature
        label = int(logits.argmax()) if label is None else label
        others = torch.cat([logits[:label], logits[label + 1 :]])
        lead = logits[label] - torch.logsumexp(others, 0) if len(others) else logits[label]
        slopes = torch.autograd.grad(lead, maps, allow_unused=True) if lead.requires_grad and maps else ()
    places = [_by_place(at * slope, method) for at, slope in zip(maps, slopes, strict=False) if slope is not None]
    if not places:
        raise UserError(f"{method.title} gives no gradient, so its answers cannot be explained")
    shown = ImageOps.contain(image, (SIDE, SIDE))
    heat = _over_picture(_combine(places), preprocess.steps, image.size, shown.size)
    probability = float(torch.softmax(logits.detach(), 0)[label])
    similar = _most_similar(method, batch.features.detach(), kept[label])
    return Explanation(names[label], probability, similar, shown, heat)


@contextmanager
def _maps(method: Method) -> Iterator[list[Tensor]]:
    """The maps that this thread computes in the block: of the trunk after those blocks that are averaged; of a tower
    without a trunk what its last blocks read."""
    trunk, tower, own = method.clip.preprocess.trunk, method.clip.vision.vision_model, get_ident()
    blocks = tower.encoder.blocks()[:-1]
    modules = [tower.pre_layrnorm, *blocks][-DEPTHS:] if trunk is None else [trunk.blocks[at] for at in trunk.depths]
    maps: list[Tensor] = []

    def keep(module: nn.Module, given: Any, output: Tensor) -> None:
        if output.requires_grad and get_ident() == own:  # other threads may be predicting
            maps.append(output)

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_hook(keep).remove)
        yield maps


def _by_place(products: Tensor, method: Method) -> Tensor:
    """(1, C, h, w) or tokens (1, T, width), of which the last are patches → (1, 1, h, w): the sum over channels."""
    if products.ndim == 4:
        return products.detach().sum(1, keepdim=True)
    config = method.clip.config.vision
    side = config.image_size // config.patch_size
    return products.detach().sum(2)[:, -config.patches :].reshape(1, 1, side, side)


def _combine(places: Sequence[Tensor]) -> Tensor:
    """(h, w) of the finest map: the geometric mean of the positive parts, from 0 to 1."""
    finest = max((each.shape[2:] for each in places), key=lambda shape: shape[0])
    # Where nothing speaks for the class, what speaks least against it is shown.
    parts = [each.clamp(min=0) if float(each.max()) > 0 else each - each.min() for each in places]
    parts = [interpolate(part, finest, mode="bilinear")[0, 0] for part in parts]
    # A place that one depth does not see is made small, not lost.
    heat = torch.stack([(part / part.mean().clamp(min=1e-30) + 1e-3).log() for part in parts]).mean(0).exp()
    return (heat - heat.min()) / (heat.max() - heat.min()).clamp(min=1e-30)


def _over_picture(heat: Tensor, steps: Steps, size: tuple[int, int], shown: tuple[int, int]) -> np.ndarray:
    """The heat (h, w) of what the backbone sees, over a picture of `size` that is shown as `shown` (width, height)."""
    across = down = (steps.short_side or min(size)) / min(size)
    if steps.exact is not None:
        across, down = steps.exact[1] / size[0], steps.exact[0] / size[1]
    wide = max(1, round(steps.crop[1] / across * shown[0] / size[0]))
    high = max(1, round(steps.crop[0] / down * shown[1] / size[1]))
    seen = Image.fromarray(heat.cpu().float().numpy()).resize((wide, high), Image.Resampling.BICUBIC)
    canvas = Image.new("F", shown)
    canvas.paste(seen, ((shown[0] - wide) // 2, (shown[1] - high) // 2))
    return np.asarray(canvas).clip(0, 1)


@torch.no_grad()
def _most_similar(method: Method, features: Tensor, kept: Sequence[bytes]) -> bytes | None:
    """The kept picture whose features have the highest cosine with the features (1, dim) of the picture."""
    pictures, preprocess = {}, method.clip.preprocess
    for jpeg in kept:
        with suppress(UserError):  # a damaged one is not shown
            pictures[jpeg] = preprocess.picture(decode(jpeg, "a kept picture"))
    if not pictures:
        return None
    pixels = preprocess.finish(torch.stack([*pictures.values()]).to(method.device))
    likeness = cosine_similarity(TensorBatch(method.clip, pixels).features, features)
    return [*pictures][int(likeness.argmax())]


def _png(panels: Sequence[Image.Image]) -> bytes:
    """Pictures of one height side by side as a PNG file, which says that clipcil made it."""
    page = Image.new("RGB", (sum(panel.width + GAP for panel in panels) - GAP, panels[0].height), "white")
    left = 0
    for panel in panels:
        page.paste(panel, (left, 0))
        left += panel.width + GAP
    file, made = io.BytesIO(), PngImagePlugin.PngInfo()
    made.add_text("Software", MADE_BY)
    page.save(file, "PNG", pnginfo=made)
    return file.getvalue()

"""CLIP: the two towers with their tokenizer and preprocessing."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clipcil.clip.config import CLIPConfig
from clipcil.clip.preprocess import Preprocess
from clipcil.clip.text import TextTower
from clipcil.clip.tokenizer import Tokenizer
from clipcil.clip.vision import VisionTower

_TEXTS_AT_ONCE = 256  # enough rows for the matrix products to run at full rate, few enough to stay in the cache


class CLIP(nn.Module):
    """score(picture, text) = exp(logit_scale) · cos(vision(picture), text(text))."""

    def __init__(self, config: CLIPConfig, tokenizer: Tokenizer, preprocess: Preprocess, name: str) -> None:
        super().__init__()
        self.name = name
        self.pinned = name
        """The name, with the commit where the weights come from the hub."""
        self.config = config
        self.tokenizer = tokenizer
        self.preprocess = preprocess
        self.vision = VisionTower(config.vision, config.dim)
        if preprocess.rest is not None:
            self.vision.start, self.vision.inner = preprocess.rest, preprocess.rest.inner_sizes
        self.text = TextTower(config.text, config.dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))  # ln(1/0.07), CLIP's initial value
        self.fingerprint = ""
        self.version = ""
        self._touched = 0

    @property
    def scale(self) -> Tensor:
        """exp(logit_scale), a 0-d tensor."""
        return self.logit_scale.exp()

    def freeze(self) -> CLIP:
        """Prepare for use: evaluation mode, no gradients, fingerprint of the weights."""
        self.eval().requires_grad_(False)
        self.fingerprint = self.version = _fingerprint(self)
        self._touched = 0
        return self

    def touch(self) -> None:
        """Mark the tower's weights as changed, so that features cached under the old version are not used again."""
        self._touched += 1
        self.version = f"{self.fingerprint}+{self._touched}"

    def with_own_vision_tower(self) -> CLIP:
        """A CLIP with a copy of the vision tower, which may be tuned; it shares everything else."""
        own = copy.copy(self)
        own._modules = dict(self._modules)
        own.vision = copy.deepcopy(self.vision)
        return own

    @torch.no_grad()
    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """N texts → (N, dim), not normalised. Encoded in order of length, so short texts need little padding."""
        device = self.logit_scale.device
        ids, ends = self.tokenizer(texts)
        ids, ends = ids.to(device), ends.to(device)
        features = torch.empty(len(texts), self.config.dim, device=device)
        order = torch.argsort(ends, stable=True)
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            rows = order[start : start + _TEXTS_AT_ONCE]
            length = int(ends[rows].max()) + 1
            features[rows] = self.text(self.text.embed(ids[rows, :length]), ends[rows]).to(features.dtype)
        return features


def _fingerprint(clip: CLIP) -> str:
    """A short SHA-256 of config and weights, which does not depend on the format of the file.

    The fingerprint of the preprocessing covers the whole trunk, also the part with which the vision tower begins.
    """
    digest = hashlib.sha256(repr(clip.config).encode())
    own = {name: tensor for name, tensor in clip.state_dict().items() if not name.startswith("vision.start.")}
    for name, tensor in sorted(own.items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()[:12]

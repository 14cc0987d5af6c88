"""The two towers, their tokenizer and preprocessing, and loading weights."""

from clipcil.clip.loading import load_clip
from clipcil.clip.model import CLIP

__all__ = ["CLIP", "load_clip"]

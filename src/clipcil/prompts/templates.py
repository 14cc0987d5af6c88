"""Class texts from template sentences: one vector per class, averaged over the templates."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import normalize

from clipcil.clip import CLIP
from clipcil.data.names import check_template
from clipcil.errors import UserError


def fill(template: str, name: str) -> str:
    """`a photo of a {}.` with the class name in place of the braces."""
    return check_template(template).replace("{}", name)


def check_sentences(clip: CLIP, names: Sequence[str], templates: Sequence[str]) -> None:
    """Refuse names that make a sentence too long for the text tower, and a dataset without templates."""
    if not templates:
        raise UserError("no template for the class names; give at least one, such as 'a photo of a {}.'")
    _, ends = clip.tokenizer([fill(template, "") for template in templates])
    longest = templates[int(ends.argmax())]
    clip.tokenizer([fill(longest, name) for name in names])


def raw_sentences(clip: CLIP, names: Sequence[str], templates: Sequence[str]) -> Tensor:
    """Text features of every class in every template, not normalised: (N, T, dim)."""
    texts = clip.encode_texts([fill(template, name) for name in names for template in templates])
    return texts.reshape(len(names), len(templates), -1)


def encode_sentences(clip: CLIP, names: Sequence[str], templates: Sequence[str]) -> Tensor:
    """Unit text features of every class in every template: (N, T, dim)."""
    return normalize(raw_sentences(clip, names, templates), dim=-1)


def ensemble(sentences: Tensor) -> Tensor:
    """Unit sentences (N, T, dim) → unit class texts (N, dim): the mean, normalised again."""
    return normalize(sentences.mean(1), dim=-1)


def encode_classes(clip: CLIP, names: Sequence[str], templates: Sequence[str]) -> Tensor:
    """Unit class texts (N, dim): each template embedding normalised, averaged, normalised again."""
    return ensemble(encode_sentences(clip, names, templates))

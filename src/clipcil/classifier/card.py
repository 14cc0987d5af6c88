"""The model card in the folder of a model, and the wording that it shares with commands and errors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from clipcil.classifier.scoring import ENOUGH, Calibration
from clipcil.errors import printable
from clipcil.methods.registry import find_method

if TYPE_CHECKING:
    from clipcil.classifier.state import Facts
    from clipcil.methods.base import Method


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun.

    Example:
        >>> counted(1, "class", "classes"), counted(2, "picture")
        ('1 class', '2 pictures')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def when_unknown(how: Calibration) -> str:
    """When a picture is called "none of these", and how often that is a false alarm."""
    if how.threshold is None:
        few = "too few pictures are kept for evaluation" if how.pictures < ENOUGH else "the model knows one class"
        return f"nothing is called 'none of these': {few}"
    below = f"the likeliest class is below {how.threshold:.1%}"
    where = below if how.novelty is None else "a picture is unlike every class"
    share = f"{how.false_alarms or 0:.1%} of new pictures of known classes"
    return f"'none of these' where {where}; to be expected for {share}"


CARD = """# A clipcil model

Method {method} on backbone {backbone}, seed {seed}. {classes} classes from {pictures} pictures in {lessons} lessons. \
{kept}

{accuracy}Unknown pictures: {unknown}.

```
clipcil predict . picture.jpg
clipcil learn . more-pictures/
```

It distinguishes only these classes. It was not evaluated for use on people, or where mistakes do harm.

| class | learnt | pictures |
|---|---|---|
{rows}
"""


def model_card(facts: Facts) -> str:
    """Markdown: what the model knows, how it was made, what it holds of pictures, how to use it."""
    kind = find_method(facts.method)
    pictures = sum(known.pictures for known in facts.known)
    rows = [f"| {_cell(known.name)} | {known.learnt} | {known.pictures} |" for known in facts.known]
    right, total = facts.right
    accuracy = f"It classifies {right} of {total} pictures kept for evaluation correctly.\n" if total else ""
    kept = (
        "Its weights hold features of training pictures (exemplars), no picture itself."
        if kind.keeps_exemplars
        else f"Its weights hold no picture: {kept_statistics(kind) or 'what was trained'}, and the features of pictures"
        " kept for evaluation."
    )
    return CARD.format(
        method=kind.title,
        backbone=f"`{facts.backbone}` ({facts.fingerprint})",
        seed=facts.seed,
        classes=len(rows),
        pictures=pictures,
        lessons=facts.lessons,
        kept=kept,
        accuracy=accuracy,
        unknown=when_unknown(facts.calibration),
        rows="\n".join(rows),
    )


def kept_statistics(kind: type[Method]) -> str:
    """The statistics that a method keeps of its training pictures, and what they reveal; "" for none, and for
    exemplars, which are counted elsewhere.

    The mean of one picture is its features, and the centred rows of a scatter are those of as many pictures.
    """
    if kind.keeps_exemplars or kind.keeps in ("nothing", "prompts"):
        return ""
    return f"{kind.keeps} (of a class with few training pictures, their features can be computed from these)"


def _cell(text: str) -> str:
    """A name as Markdown shows it unchanged: it may hold line breaks, marks of Markdown and HTML."""
    return re.sub(r"([\\`*_\[\]<>&|~])", r"\\\1", printable(text))

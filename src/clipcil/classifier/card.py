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


def why_never_unknown(how: Calibration) -> str:
    """Why there is no threshold for "none of these"."""
    few = how.pictures < ENOUGH
    return "too few pictures are kept for evaluation" if few else "the model knows one class"


CARD = """# A clipcil model

Method {method} on backbone {backbone}, seed {seed}. {classes} classes from {pictures} pictures in {lessons} lessons. \
{kept}

{threshold}

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
    unknown = facts.calibration
    pictures = sum(known.pictures for known in facts.known)
    rows = [f"| {_cell(known.name)} | {known.learnt} | {known.pictures} |" for known in facts.known]
    if unknown.threshold is None:
        threshold = f"No picture is called unknown: {why_never_unknown(unknown)}."
    else:
        probability = f"whose likeliest class has less than {unknown.threshold:.1%}"
        how = probability if unknown.novelty is None else "that is unlike every class"
        threshold = (
            f"A picture {how} is called unknown. To be expected for {unknown.false_alarms or 0:.1%} of new pictures of"
            f" known classes, by {unknown.pictures} pictures."
        )
    right, total = facts.right
    accuracy = f" It classifies {right} of {total} pictures kept for evaluation correctly." if total else ""
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
        threshold=threshold + accuracy,
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

"""Zero-shot CLIP (https://arxiv.org/abs/2103.00020): pictures against the texts of the classes seen.

    score(x, c) = s · cos(v(x), t_c),    t_c the text of class c

Nothing is learnt and nothing is kept. DMC's paper names one plain sentence (section 3.1), and its low zero-shot
accuracy suggests one sentence too, not an average of many.

Examples:
    >>> import clipcil
    >>> experiment = clipcil.Experiment("zero-shot", data="emoji", tasks=10)
    >>> for task in experiment:
    ...     experiment.learn(task)
    >>> experiment.evaluate().last
    14.0
"""

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import normalize

from clipcil.data.names import Template
from clipcil.data.reader import Batch
from clipcil.data.tasks import Task
from clipcil.methods.base import Method
from clipcil.methods.registry import register
from clipcil.prompts.templates import check_sentences, encode_classes
from clipcil.settings import options


@options
class ZeroShotConfig:
    """How the class names are put into sentences."""

    template: Template = "a photo of a {}."
    """The sentence of a class, the same on every dataset; {} is the class name."""
    ensemble: bool = False
    """Average over the sentences of the dataset instead."""


@register
class ZeroShot(Method):
    name = "zero-shot"
    title = "Zero-shot CLIP"
    Config = ZeroShotConfig
    class_vectors = "texts"
    config: ZeroShotConfig
    texts: Tensor  # (C, dim), unit length

    def build(self) -> None:
        self.growing_buffer("texts", self.dim)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The templates that a class text is the mean of."""
        return self.templates if self.config.ensemble else (self.config.template,)

    def check_names(self, names: Sequence[str]) -> None:
        check_sentences(self.clip, names, self.sentences)

    def allocate(self, names: Sequence[str]) -> None:
        self.texts[self.old :] = encode_classes(self.clip, names, self.sentences)

    def learn_task(self, task: Task) -> None:
        """Nothing is learnt: the texts follow from the names."""

    def logits(self, batch: Batch) -> Tensor:
        return self.clip.scale * normalize(batch.features, dim=-1) @ self.texts.T

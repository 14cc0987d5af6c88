"""P1: one training step of soft prompts.

Peers: every class's prompt is padded to the 77 tokens of the context and passes all layers whole; PromptFusion-style
code also lets autograd compute the gradients of the frozen tower's weights. CoOp-style code does not, so that is a
second line. Both use this project's own blocks, which are faster than the reference's attention modules; the peers'
side multiplies by torch's own BLAS.
Ours: cut where each name ends, last layer at the end token alone, gradients for the prompt vectors alone.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, pad

from benchmarks.harness import Row, alternate, difference, usual_products, versus
from benchmarks.shapes import B16_TEXT, MINI_TEXT, SMALL_VISION, names, random_clip
from clipcil.clip import CLIP
from clipcil.prompts.text import PromptTexts, encode_prompts


def encode_padded(clip: CLIP, embeddings: Tensor, ends: Tensor) -> Tensor:
    """The peers' way: all 77 positions through all layers, then the end token is picked."""
    model, context = clip.text.text_model, clip.config.text.context
    hidden = pad(embeddings, (0, 0, 0, context - embeddings.shape[1])) + model.embeddings.position_embedding.weight
    for block in model.encoder.blocks():
        hidden = block(hidden, causal=True)
    hidden = model.final_layer_norm(hidden)
    features: Tensor = clip.text.text_projection(hidden[torch.arange(len(ends)), ends])
    return features


class Step:
    """Cross-entropy of a batch of features against the texts of all classes, and the gradient of the prompts."""

    def __init__(self, clip: CLIP, classes: int, length: int = 10, batch: int = 32) -> None:
        torch.manual_seed(0)
        self.clip = clip
        self.texts = PromptTexts(clip, names(classes), length)
        self.prompts = nn.Parameter(0.02 * torch.randn(classes, length, clip.config.text.width))
        self.features = normalize(torch.randn(batch, clip.config.dim), dim=-1)
        self.labels = torch.randint(classes, (batch,))

    def ours(self) -> Tensor:
        return self._gradient(encode_prompts(self.clip, [self.texts(self.prompts)]))

    def theirs(self, weight_gradients: bool) -> Tensor:
        self.clip.text.requires_grad_(weight_gradients)
        try:
            with usual_products():
                return self._gradient(encode_padded(self.clip, *self.texts(self.prompts)))
        finally:
            self.clip.text.requires_grad_(False)
            for parameter in self.clip.text.parameters():
                parameter.grad = None

    def _gradient(self, encoded: Tensor) -> Tensor:
        self.prompts.grad = None
        scores = self.clip.scale * self.features @ normalize(encoded, dim=-1).T
        torch.autograd.backward(cross_entropy(scores, self.labels))
        (gradient,) = (p.grad for p in [self.prompts] if p.grad is not None)
        return gradient.clone()


def run(quick: bool) -> list[Row]:
    text, classes = (MINI_TEXT, 10) if quick else (B16_TEXT, 100)
    step = Step(random_clip(SMALL_VISION, text), classes)
    error = difference(step.ours(), step.theirs(weight_gradients=True))
    sides = {
        "weights": lambda: step.theirs(weight_gradients=True),
        "frozen": lambda: step.theirs(weight_gradients=False),
        "ours": step.ours,
    }
    seconds = alternate(sides, repeats=2, warm_up=False)
    rows = []
    for kind, what, goal in (("weights", "weight gradients too", 5.0), ("frozen", "weights frozen", None)):
        pair = {"theirs": seconds[kind], "ours": seconds["ours"]}
        title = f"prompt step, {classes} classes, M=10, batch 32; peers: {text.context} tokens, {what}"
        rows.append(versus("P1", title, pair, goal, error=error, tolerance=1e-5))
    return rows

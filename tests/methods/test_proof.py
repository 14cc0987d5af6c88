"""PROOF, facts read at zhoudw-zdw/PROOF, commit 0bb2052 (models/proof.py, utils/inc_net.py, convs/projections.py).

- A linear projection (with bias) of pictures and one of texts for each task; outputs summed over tasks; inputs are
  raw.
- Prototypes: means of unit features, projected like pictures, normalised. Three context prompts a task, from N(0, 1).
- Fusion: single-headed self-attention over [picture; texts; prototypes; contexts], no biases in q, k, v, temperature
  √d, dropout 0.1 on the weights and after the output layer, residual, LayerNorm; all matrices Xavier-normal.
- Loss: CLIP's symmetric in-batch loss of unit pictures and unit texts (first template, scale exp(logit_scale),
  trained) + cross-entropy of fused picture · fused text + the same with fused prototypes, over all classes seen. In
  training the picture enters the fusion at unit length.
- Test: raw projected picture · unit text + fused picture · (fused text + fused prototype), where the *raw* projected
  picture enters the fusion; the unit text is the normalised mean of the unit projected texts of all templates.
- From the second task on all text projections train; image projections and contexts of earlier tasks do not.

The code averages fused texts and prototypes over the batch. For a batch of one picture that changes nothing:
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm, normalize

from clipcil.clip import CLIP
from clipcil.memory.exemplars import Budget
from clipcil.methods import proof
from clipcil.methods.proof import PROOF, PROOFConfig, TokenScores
from clipcil.training.cpu import draw_kept
from reproduce.fidelity.stream import add_up
from support.features import make_tasks, make_test
from support.visual_stream import Recorder

TEMPLATES = ("a photo of a {}.", "a drawing of a {}.", "art of the {}.")


def fuse(method: PROOF, picture: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One picture (d,), texts (C, d) → fused picture (d,), texts (C, d), prototypes (C, d)."""
    block, count = method.fusion, len(texts)
    prototypes = normalize(add_up(method.image_projections, method.prototypes), dim=-1)
    x = torch.cat([picture[None], texts, prototypes, *method.contexts])
    weights = torch.softmax((x @ block.query.weight.T) @ (x @ block.key.weight.T).T / x.shape[1] ** 0.5, dim=1)
    mixed = weights @ (x @ block.value.weight.T) @ block.out.weight.T + block.out.bias
    y = nn.functional.layer_norm(x + mixed, x.shape[1:], block.norm.weight, block.norm.bias)
    return y[0], y[1 : 1 + count], y[1 + count : 1 + 2 * count]


def learnt(clip: CLIP, **options: Any) -> tuple[PROOF, Recorder, Any]:
    """Two tasks with random parameters."""
    session, tasks = Recorder(), make_tasks(clip, [2, 3])
    method = PROOF(PROOFConfig(memory=Budget(2, "class"), dropout=0.0, **options), clip, session, TEMPLATES)
    torch.manual_seed(0)
    for task in tasks:
        method.learn(task)
    with torch.no_grad():
        for parameter in method.parameters():
            if parameter.dim():
                parameter.normal_(std=0.4)
    return method, session, tasks


def test_score_is_the_reference(tiny_clip: CLIP) -> None:
    method, _, _ = learnt(tiny_clip)
    pictures = make_test(tiny_clip, 5, per_class=2)
    with torch.no_grad():
        method.tokens = method.shared_tokens(method.sentences)  # of the random parameters
        texts = []
        for name in method.names:
            about = add_up(method.text_projections, tiny_clip.encode_texts([t.format(name) for t in TEMPLATES]))
            texts.append(normalize(normalize(about, dim=-1).mean(0), dim=-1))
        w = torch.stack(texts)
        for row, feature in enumerate(pictures.features):
            z = add_up(method.image_projections, feature)
            own, around, prototypes = fuse(method, z, w)
            expected = w @ z + around @ own + prototypes @ own
            score = method.logits(pictures[row : row + 1])[0]
            torch.testing.assert_close(score, expected, atol=1e-3, rtol=1e-3)


def test_loss_and_what_trains_are_the_reference(tiny_clip: CLIP) -> None:
    method, session, tasks = learnt(tiny_clip)
    names = {id(p): name for name, p in method.named_parameters()}
    trained = {names[id(p)].rsplit(".", 1)[0] for p in session.trained}
    assert trained == {
        *("image_projections.1", "text_projections.0", "text_projections.1", "contexts", "logit_scale"),
        *(f"fusion.{part}" for part in ("query", "key", "value", "out", "norm")),
    }
    assert names[id(method.contexts[0])] not in {names[id(p)] for p in session.trained}
    described, other, _ = learnt(tiny_clip, train_old_text_projections=False)
    frozen = {id(parameter) for parameter in described.text_projections[0].parameters()}
    assert len(other.trained) == len(session.trained) - 2 and not frozen & {id(p) for p in other.trained}
    features = torch.cat([tasks[1].pictures.features, method.memory.features[:4]])  # new pictures, then old exemplars
    labels = torch.cat([tasks[1].pictures.labels, method.memory.labels[:4]])
    rows = torch.tensor([0, 5, 13, len(labels) - 1])
    y = labels[rows]
    assert set(y.tolist()) & {0, 1} and set(y.tolist()) & {2, 3, 4}
    first = tiny_clip.encode_texts([TEMPLATES[0].format(name) for name in method.names])
    texts = normalize(add_up(method.text_projections, first), dim=-1)
    pictures = normalize(add_up(method.image_projections, features[rows]), dim=-1)
    logits, place = method.logit_scale.exp() * pictures @ texts[y].T, torch.arange(4)
    expected = (cross_entropy(logits, place) + cross_entropy(logits.T, place)) / 2
    for picture, label in zip(pictures, y, strict=True):
        own, around, prototypes = fuse(method, picture, texts)
        for tokens in (around, prototypes):
            expected = expected + cross_entropy((tokens @ own)[None], label[None]) / 4
    torch.testing.assert_close(session.loss(rows), expected, atol=1e-4, rtol=1e-4)


def test_start_is_the_reference(tiny_clip: CLIP) -> None:
    torch.manual_seed(0)
    fusion = PROOF(PROOFConfig(), tiny_clip, Recorder()).fusion
    dim = tiny_clip.config.dim
    for layer in (fusion.query, fusion.key, fusion.value, fusion.out):
        assert abs(float(layer.weight.std()) / (2 / (dim + dim)) ** 0.5 - 1) < 0.15
    assert fusion.dropout.p == 0.1 and fusion.query.bias is None and fusion.out.bias is not None


@pytest.mark.parametrize("size", [1, 200, 10**6])
def test_scores_of_tokens_have_the_gradients_of_autograd(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout: both sides take the same masks, in parts of one picture, of three and of all."""
    torch.manual_seed(0)
    monkeypatch.setattr(proof, "IN_CACHE", size)
    pictures, tokens, dim, share = 5, 4, 16, 0.25
    shapes = [(pictures, dim), (tokens, dim), (tokens, dim), (pictures, dim), (pictures, tokens), (pictures, tokens)]
    given = [torch.randn(*shape).double().requires_grad_() for shape in [*shapes, (dim,), (dim,), (dim,)]]
    masks = []

    def draw(*words: object) -> torch.Tensor:
        masks.append(draw_kept(*words))
        return masks[-1]

    monkeypatch.setattr(proof, "draw_kept", draw)
    ours = TokenScores.apply(1e-5, share, *given)
    assert len(masks) == {1: 5, 200: 2, 10**6: 1}[size]
    fused, shared, among, own, alpha, dropped, centre, weight, bias = given
    mixed = among + alpha[..., None] * (centre - among) + dropped[..., None] * own[:, None]
    inside = shared + torch.cat(masks) * mixed / (1 - share)
    expected = torch.einsum("bd,bnd->bn", fused, layer_norm(inside, [dim], weight, bias, 1e-5))
    torch.testing.assert_close(ours, expected)
    direction = torch.randn(pictures, tokens).double()
    found = torch.autograd.grad((ours * direction).sum(), given)
    for one, other in zip(found, torch.autograd.grad((expected * direction).sum(), given), strict=True):
        torch.testing.assert_close(one, other)

"""CoOp, facts read at KaiyangZhou/CoOp, commit ff61507 (trainers/coop.py, configs/trainers/CoOp/vit_b16.yaml).

- Prompt: [SOS] V_1 … V_M name . [EOS], 77 tokens, the placeholder's embeddings replaced by V; V shared by all
  classes.
- Text feature: the tower's output at the end-of-text token, projected, normalised; score = s · cos; cross-entropy.

No class-incremental version is official; epochs, exemplars and the growing set of classes are not CoOp's.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy, normalize

from clipcil.clip import CLIP
from clipcil.memory.exemplars import Budget
from clipcil.methods.coop import CoOp, CoOpConfig
from clipcil.training.trainer import Trainer, Training
from support.features import WORDS, FeaturePictures, learn_all, make_tasks, make_test


def test_score_is_the_reference(tiny_clip: CLIP) -> None:
    """Every class by itself: "name." is tokenised, the context put before it, nothing is cut or shared."""
    config = CoOpConfig(train=Training(epochs=1, optimizer="sgd"), context_length=3, memory=Budget(2, "class"))
    torch.manual_seed(0)
    method = learn_all(CoOp(config, tiny_clip, Trainer()), make_tasks(tiny_clip, [2, 2]))
    assert isinstance(method, CoOp)
    pictures, model = make_test(tiny_clip, 4, per_class=2), tiny_clip.text.text_model
    texts = []
    for name in method.names:
        tokens, _ = tiny_clip.tokenizer([f"{name}."])
        hidden = model.embeddings.token_embedding(tokens)
        hidden = torch.cat([hidden[:, :1], method.context, hidden[:, 1:]], dim=1)
        end = hidden.shape[1] - 1
        hidden = hidden + model.embeddings.position_embedding.weight[: hidden.shape[1]]
        texts.append(_encode(tiny_clip, hidden)[0, end])
    unit = normalize(tiny_clip.text.text_projection(torch.stack(texts)), dim=-1)
    expected = tiny_clip.logit_scale.exp() * normalize(pictures.features, dim=-1) @ unit.T
    torch.testing.assert_close(method.logits(pictures), expected, atol=1e-3, rtol=1e-4)  # type: ignore[arg-type]


def _encode(clip: CLIP, hidden: torch.Tensor) -> torch.Tensor:
    """The causal text tower, one head after the other."""
    model = clip.text.text_model
    mask = torch.full((hidden.shape[1], hidden.shape[1]), -torch.inf).triu(1)
    for block in model.encoder.blocks():
        attention, normed = block.self_attn, block.layer_norm1(hidden)
        parts = [
            layer(normed).chunk(attention.heads, dim=2)
            for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        mixed = [
            (q @ k.transpose(1, 2) / q.shape[2] ** 0.5 + mask).softmax(2) @ v for q, k, v in zip(*parts, strict=True)
        ]
        hidden = hidden + attention.out_proj(torch.cat(mixed, dim=2))
        hidden = hidden + block.mlp(block.layer_norm2(hidden))
    return model.final_layer_norm(hidden)


QUICK = Training(epochs=4, lr=0.02, optimizer="sgd", batch_size=16)


def make(clip: CLIP, train: Training = QUICK) -> CoOp:
    torch.manual_seed(0)
    return CoOp(CoOpConfig(train=train, context_length=4, memory=Budget(3, "class")), clip, Trainer())


def teach(clip: CLIP, pictures: FeaturePictures) -> None:
    """Put the features near what the tower says of the classes, so that there is a context to be found."""
    texts = normalize(clip.encode_texts([f"a drawing of a {name}." for name in WORDS]), dim=-1)
    pictures.features = texts[pictures.labels] + 0.1 * pictures.features


def test_learns_over_all_classes(mini: CLIP) -> None:
    tasks, pictures = make_tasks(mini, [3, 1, 2]), make_test(mini, 6)
    for part in (pictures, *(task.pictures for task in tasks)):
        teach(mini, part)  # type: ignore[arg-type]
    untrained = learn_all(make(mini, Training(epochs=0)), tasks)
    method = learn_all(make(mini), tasks)
    before, after = (cross_entropy(m.logits(pictures), pictures.labels) for m in (untrained, method))
    assert after < 0.5 * before
    assert [name for name, _ in method.named_parameters()] == ["context"]
    assert method.memory.labels.tolist() == [label for label in range(6) for _ in range(3)]


def test_exemplars_take_part_in_training(tiny_clip: CLIP) -> None:
    """Without them the second task trains on other pictures: the context must come out different."""
    tasks = make_tasks(tiny_clip, [2, 2])
    method, forgetful = make(tiny_clip), make(tiny_clip)
    learn_all(method, tasks[:1])
    learn_all(forgetful, tasks[:1])
    assert torch.equal(method.context, forgetful.context)  # the same seed, the same run
    forgetful.memory.features, forgetful.memory.labels = forgetful.memory.features[:0], forgetful.memory.labels[:0]
    learn_all(method, tasks[1:])
    learn_all(forgetful, tasks[1:])
    assert not torch.allclose(method.context, forgetful.context)

"""CoOp, facts read at KaiyangZhou/CoOp, commit ff61507 (trainers/coop.py, configs/trainers/CoOp/vit_b16.yaml).

- Prompt: [SOS] V_1 … V_M name . [EOS], 77 tokens, the placeholder's embeddings replaced by V; V shared by all
  classes.
- Text feature: the tower's output at the end-of-text token, projected, normalised; score = s · cos; cross-entropy.

No class-incremental version is official; epochs, exemplars and the growing set of classes are not CoOp's.
"""

import torch
from torch.nn.functional import cross_entropy, normalize

from clipcil.clip import CLIP
from clipcil.memory.exemplars import Budget
from clipcil.methods.coop import CoOp, CoOpConfig
from clipcil.training.trainer import Trainer, Training
from support.features import learn_all, make_tasks, make_test
from support.visual_stream import Recorder


def texts(clip: CLIP, method: CoOp) -> torch.Tensor:
    """Every class by itself: "name." is tokenised, the context put before it, nothing is cut or shared."""
    found = []
    for name in method.names:
        ids, ends = clip.tokenizer([f"{name}."])
        embedded = clip.text.embed(ids)
        row = torch.cat([embedded[:, :1], method.context, embedded[:, 1:]], dim=1)
        found.append(clip.text(row, ends + method.context.shape[1])[0])
    return normalize(torch.stack(found), dim=-1)


def test_score_and_loss_are_the_reference(tiny_clip: CLIP) -> None:
    session, tasks, pictures = Recorder(), make_tasks(tiny_clip, [2, 2]), make_test(tiny_clip, 4, per_class=2)
    torch.manual_seed(0)
    method = CoOp(CoOpConfig(context_length=3, memory=Budget(2, "class")), tiny_clip, session)
    learn_all(method, tasks)
    unit = texts(tiny_clip, method)
    expected = tiny_clip.logit_scale.exp() * normalize(pictures.features, dim=-1) @ unit.T
    torch.testing.assert_close(method.logits(pictures), expected, atol=1e-3, rtol=1e-4)
    assert [id(parameter) for parameter in session.trained] == [id(method.context)]
    features = torch.cat([tasks[1].pictures.features, method.memory.features[:4]])  # new pictures, then old exemplars
    labels = torch.cat([tasks[1].pictures.labels, method.memory.labels[:4]])
    rows = torch.tensor([0, 13, len(labels) - 4, len(labels) - 1])
    assert labels[rows].tolist() == [2, 3, 0, 1]
    scores = tiny_clip.logit_scale.exp() * normalize(features[rows], dim=-1) @ unit.T
    torch.testing.assert_close(session.loss(rows), cross_entropy(scores, labels[rows]), atol=1e-3, rtol=1e-4)


def test_the_context_of_the_last_task_is_trained_further(tiny_clip: CLIP) -> None:
    still, moves = (Training(epochs=epochs, lr=0.02, optimizer="sgd", batch_size=16) for epochs in (0, 2))
    contexts = []
    for train, tasks in ((still, [2]), (moves, [2]), (moves, [2, 2])):
        torch.manual_seed(0)
        method = CoOp(CoOpConfig(train=train, context_length=4), tiny_clip, Trainer())
        learn_all(method, make_tasks(tiny_clip, tasks))
        assert torch.allclose(method.classifier, texts(tiny_clip, method), atol=1e-4)
        contexts.append(method.context)
    first, second, third = contexts
    assert not torch.allclose(first, second) and not torch.allclose(second, third)

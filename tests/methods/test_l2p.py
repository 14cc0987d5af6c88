"""L2P, facts read at google-research/l2p, commit dd8836e (models/prompt.py, libml/losses.py, configs/cifar100_l2p.py).

- Keys and queries are L2-normalised; the `top_k` largest products choose; the chosen prompts, each `length` tokens,
  stand one after the other among the tokens that the first layer reads.
- Pull term: the sum of the products of the chosen unit keys with the unit query, over all pictures, divided by the
  batch.
- Cross-entropy over a head of all classes with the logits of other tasks at −∞; total = cross-entropy − 1.0 · pull.
- Prompts and keys start from flax's `uniform()`, that is U[0, 0.01); the head's kernel starts at zero.

The code lets a batch vote on its prompts. Without the vote (its own option), which is what we do at test and by
default:
"""

from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from clipcil.methods.l2p import L2P, L2PConfig
from support.visual_stream import FAST, Recorder, encode_by_hand, project, stream, tower

POOL, LENGTH, TOP = 6, 2, 3


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True).clamp(min=1e-12))


@pytest.mark.parametrize("read", ["class", "prompts"])
def test_score_and_loss_are_the_reference(read: Literal["class", "prompts"]) -> None:
    clip, session = tower(), Recorder()
    torch.manual_seed(0)
    config = L2PConfig(train=FAST, pool=POOL, length=LENGTH, top_k=TOP, head_input=read)
    method = L2P(config, clip, session)
    tasks = stream(clip).tasks()
    method.learn(next(tasks))
    task = next(tasks)
    method.learn(task)  # the recorder trains nothing
    trained = {id(parameter) for parameter in session.trained}
    assert trained == {id(p) for p in (method.prompts, method.keys, *method.head.newest())}
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.normal_()
    rows = torch.tensor([1, 8, 4, 6])
    batch = task.pictures[rows]
    weight, bias = torch.cat(list(method.head.weights)), torch.cat(list(method.head.biases))

    similarity = (unit(method.keys) @ unit(batch.features).T).T  # (B, N)
    chosen = similarity.topk(TOP, dim=1).indices
    prompt = method.prompts[chosen].reshape(4, TOP * LENGTH, -1)
    tokens = [encode_by_hand(clip, x, p) for x, p in zip(batch.pixels, prompt, strict=True)]
    if read == "class":
        features = torch.stack([project(clip, each) for each in tokens])
    else:
        norm = clip.vision.vision_model.post_layernorm
        features = torch.stack([norm(each[1 : 1 + TOP * LENGTH]).mean(0) for each in tokens])
    logits = features @ weight.T + bias
    with torch.no_grad():
        torch.testing.assert_close(method.logits(batch), logits, atol=1e-4, rtol=1e-4)

    pull = (unit(method.keys)[chosen] * unit(batch.features)[:, None]).sum() / 4
    masked = logits.clone()
    masked[:, :3] = -torch.inf
    torch.testing.assert_close(session.loss(rows), cross_entropy(masked, batch.labels) - 1.0 * pull)


def test_start_is_the_authors() -> None:
    method = L2P(L2PConfig(), tower(), Recorder())
    for started in (method.prompts, method.keys):
        assert float(started.min()) >= 0 and 0.009 < float(started.max()) < 0.01
    method.grow(["a", "b"])
    assert all(not p.any() for p in method.head.parameters())

"""L2P, facts read at google-research/l2p, commit dd8836e (models/prompt.py, libml/losses.py, configs/cifar100_l2p.py).

- Keys and queries are L2-normalised; the `top_k` largest products choose; the chosen prompts, each `length` tokens,
  stand one after the other among the tokens that the first layer reads.
- Pull term: the sum of the products of the chosen unit keys with the unit query, over all pictures, divided by the
  batch.
- Cross-entropy over a head of all classes with the logits of other tasks at −∞; total = cross-entropy − 1.0 · pull.
- Prompts and keys start from flax's `uniform()`, that is U[0, 0.01); the head's kernel starts at zero.
- 16 pictures per device, eight devices (README); rate = 0.03 × global batch / 256, constant; 5 epochs; clip norm 1.

The code lets a batch vote on its prompts. Without the vote (its own option), which is what we do at test and by
default:
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from clipcil.methods.l2p import L2P, L2PConfig
from support.visual_stream import FAST, Recorder, encode_by_hand, project, stream, tower

POOL, LENGTH, TOP = 6, 2, 3


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True).clamp(min=1e-12))


def test_score_and_loss_are_the_reference() -> None:
    clip, session = tower(), Recorder()
    torch.manual_seed(0)
    method = L2P(L2PConfig(train=FAST, pool=POOL, length=LENGTH, top_k=TOP), clip, session)
    tasks = stream(clip).tasks()
    method.learn(next(tasks))
    task = next(tasks)
    method.learn(task)  # the recorder trains nothing
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.normal_()
    rows = torch.tensor([1, 8, 4, 6])
    batch = task.pictures[rows]
    weight, bias = torch.cat(list(method.head.weights)), torch.cat(list(method.head.biases))

    similarity = (unit(method.keys) @ unit(batch.features).T).T  # (B, N)
    chosen = similarity.topk(TOP, dim=1).indices
    prompt = method.prompts[chosen].reshape(4, TOP * LENGTH, -1)
    features = torch.stack(
        [project(clip, encode_by_hand(clip, x, p)) for x, p in zip(batch.pixels, prompt, strict=True)]
    )
    logits = features @ weight.T + bias
    with torch.no_grad():
        torch.testing.assert_close(method.logits(batch), logits, atol=1e-4, rtol=1e-4)

    pull = (unit(method.keys)[chosen] * unit(batch.features)[:, None]).sum() / 4
    masked = logits.clone()
    masked[:, :3] = -torch.inf
    torch.testing.assert_close(session.loss(rows), cross_entropy(masked, batch.labels) - 1.0 * pull)


def test_start_and_recipe_are_the_authors() -> None:
    config = L2PConfig()
    method = L2P(config, tower(), Recorder())
    for started in (method.prompts, method.keys):
        assert float(started.min()) >= 0 and 0.009 < float(started.max()) < 0.01
    method.grow(["a", "b"])
    assert all(not p.any() for p in method.head.parameters())
    assert (method.prompts.shape[:2], config.top_k, config.pull) == ((10, 10), 4, 1.0)
    assert (config.train.lr, config.train.batch_size) == (0.03 * 8 * 16 / 256, 8 * 16)
    assert (config.train.epochs, config.train.schedule, config.train.clip_norm) == (5, "constant", 1)

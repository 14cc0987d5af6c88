"""RAPF, facts read at linlany/RAPF, commit 81d41df (main.py, continual_clip/models.py, configs/class/).

- Score: exp(logit_scale) · cos(A v, t), A without bias, v raw; t from "a good photo of a {}.".
- Replay: `n` old classes a step, in a shuffled order, by turns; 10β features each. Hard pairs: old i and new j whose
  unit texts are closer than τ; 20β features of class i each; hinge relu(−cos(A x, t_i) + cos(A x, t_j) + 0.1), mean
  over all.
- Loss: cross-entropy over all classes on pictures and replayed features, plus the hinge where there are pairs.
- Fusion: W_old = U S Vᵀ; Δ = |Uᵀ W_new − S Vᵀ|; mask = min(Δ / max Δ + b, 1); W = U (Uᵀ W_new ⊙ mask + S Vᵀ ⊙ (1 −
  mask)).
- `shrink`: Σ + mean(diagonal) I + mean(off-diagonal) (1 − I).
"""

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from clipcil.methods.rapf import RAPF, RAPFConfig, average_entries, fuse, widening
from support.visual_stream import FAST, Recorder, stream, tower


def test_fusion_is_the_reference() -> None:
    torch.manual_seed(0)
    old, new = torch.randn(2, 16, 16, dtype=torch.float64)
    U, S, V = torch.linalg.svd(old)
    right = torch.diag(S) @ V
    change = (U.T @ new - right).abs()
    mask = torch.clamp(change / change.max() + 0.6, max=1)
    torch.testing.assert_close(fuse(old, new, 0.6), U @ (U.T @ new * mask + right * (1 - mask)))


def test_score_and_loss_are_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """With memories that give their means for every draw, so that only the arithmetic is compared."""
    clip, session = tower(), Recorder()
    config = RAPFConfig(adapter=FAST, threshold=1.2, replay_classes=2, replay_each=3, replay_epoch=0, pair_each=2)
    torch.manual_seed(0)
    method = RAPF(config, clip, session)
    tasks = stream(clip).tasks()
    method.learn(next(tasks))
    means = method.memory.means().float()
    monkeypatch.setattr(method.memory, "sample", lambda classes: means[classes])
    task = next(tasks)
    method.learn(task)
    texts = normalize(clip.encode_texts([f"a good photo of a {name}." for name in method.names]), dim=-1)
    rows = torch.tensor([2, 7])
    torch.manual_seed(1)
    session.each_epoch()
    value = session.loss(rows)
    torch.manual_seed(1)
    order = torch.randperm(3)
    steps = -(-len(task.pictures) // FAST.batch_size)
    last = [int(order[(2 * (steps - 1) + i) % 3]) for i in range(2)]  # our epochs hand their draws out from the end
    replay = torch.tensor(last).repeat_interleave(3)

    def scores(v: torch.Tensor) -> torch.Tensor:
        return normalize(v @ method.adapter.weight.T, dim=-1) @ texts.T

    batch = task.pictures[rows]
    inputs, targets = torch.cat([batch.features, means[replay]]), torch.cat([batch.labels, replay])
    scale = clip.logit_scale.exp()
    torch.testing.assert_close(method.logits(batch), scale * scores(batch.features), atol=1e-4, rtol=1e-4)
    pairs = [(i, j) for i in range(3) for j in range(3, 5) if float((texts[i] - texts[j]).norm()) < 1.2]
    assert len(pairs) > 0
    hinge = [torch.relu(-scores(means[i])[i] + scores(means[i])[j] + 0.1) for i, j in pairs for _ in range(2)]
    expected = cross_entropy(scale * scores(inputs), targets) + torch.stack(hinge).mean()
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_widening_adds_the_covariance_it_says(sign: float) -> None:
    dim = 4
    factor = torch.eye(dim) + sign * 0.2 * torch.ones(dim, dim)
    covariance = factor @ factor.T
    a, b = average_entries(covariance).tolist()
    assert a == pytest.approx(float(covariance.diagonal().mean()))
    assert b == pytest.approx(float(covariance[~torch.eye(dim, dtype=torch.bool)].mean()))
    torch.manual_seed(0)
    drawn = widening(torch.tensor([[a, b]]).expand(200_000, 2), dim)
    wanted = torch.full((dim, dim), b).fill_diagonal_(a)
    torch.testing.assert_close(torch.cov(drawn.T), wanted, atol=0.02, rtol=0)

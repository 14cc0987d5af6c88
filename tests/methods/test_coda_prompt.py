"""CODA-Prompt, facts read at GT-RIPL/CODA-Prompt, commit 6417d4f (models/zoo.py, learners/prompt.py, experiments/).

- Per layer 0…4: α = ⟨normalise(q ⊙ A), normalise(K)⟩ for each component, prompt = Σ α P, first half keys, second
  values; in training the components of earlier tasks are detached but stay in the sum.
- Cross-entropy with the logits of earlier tasks at −∞, plus μ · Σ mean((B Bᵀ − I)²) over K, A and flattened P and
  over layers; μ = 0 in the scripts.
- A task's new rows: Gram–Schmidt against all earlier rows, then unit length.
- 100 components in all, whatever the number of tasks (5 each with twenty), length 8; Adam 1e-3, batch 128, 20 epochs
  on CIFAR-100 and 50 on ImageNet-R; cos(99 π e / (200 (K − 1))) in epoch e of K.
"""

import torch
from torch.nn.functional import cross_entropy, normalize

from clipcil.methods.coda_prompt import CODAPrompt, CODAPromptConfig
from support.visual_stream import FAST, Recorder, all_tests, encode_by_hand, learnt, project, stream, tower


def test_score_loss_and_gradient_are_the_reference() -> None:
    clip, session = tower(), Recorder()
    torch.manual_seed(0)
    config = CODAPromptConfig(train=FAST, components=4, length=6, ortho=0.3)
    method = CODAPrompt(config, clip, session)
    tasks = stream(clip).tasks()
    for _ in range(2):
        task = next(tasks)
        method.learn(task)  # the recorder trains nothing
        for parameter in session.trained:
            parameter.detach().normal_(std=0.5)
    for parameter in session.trained:
        parameter.requires_grad_(True)
    newest = [rows[-1] for rows in (method.prompts, method.keys, method.attention)]
    assert {id(p) for p in (*newest, *method.head.newest())} == {id(parameter) for parameter in session.trained}
    rows = torch.tensor([0, 9, 5])
    batch = task.pictures[rows]
    prefixes, penalty = [], torch.zeros(())
    for layer in range(5):
        parts = (method.prompts, method.keys, method.attention)
        P, K, A = (torch.cat([part[0][layer].detach(), part[1][layer]]) for part in parts)
        attended = torch.einsum("bd,kd->bkd", batch.features, A)
        alpha = torch.einsum("bkd,kd->bk", normalize(attended, dim=2), normalize(K, dim=1))
        prompt = torch.einsum("bk,kld->bld", alpha, P.view(8, 6, -1))
        prefixes.append((prompt[:, :3], prompt[:, 3:]))
        penalty = penalty + sum(((t @ t.T - torch.eye(8)) ** 2).mean() for t in (K, A, P))
    features = []
    for b, x in enumerate(batch.pixels):
        own = {layer: (keys[b], values[b]) for layer, (keys, values) in enumerate(prefixes)}
        features.append(project(clip, encode_by_hand(clip, x, prefixes=own)))
    logits = torch.stack(features) @ torch.cat(list(method.head.weights)).T + torch.cat(list(method.head.biases))
    torch.testing.assert_close(method.logits(batch), logits, atol=1e-4, rtol=1e-4)
    masked = torch.cat([torch.full((3, 3), -torch.inf), logits[:, 3:]], dim=1)
    expected = cross_entropy(masked, batch.labels) + 0.3 * penalty
    ours = session.loss(rows)
    torch.testing.assert_close(ours, expected)
    found, wanted = (torch.autograd.grad(value, session.trained) for value in (ours, expected))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)
    method.grow(["one more"])  # its components start orthogonal to all others
    for part in (method.prompts, method.keys, method.attention):
        earlier, new = torch.cat(list(part)[:-1], dim=1), part[-1]
        assert (earlier @ new.transpose(1, 2)).abs().max() < 1e-4
        torch.testing.assert_close(new @ new.transpose(1, 2), torch.eye(4).expand(5, 4, 4), atol=1e-5, rtol=0)


def test_a_tower_without_any_of_the_layers_is_read_without_prompts() -> None:
    clip = tower()
    source = stream(clip)
    method = learnt(CODAPrompt, CODAPromptConfig(train=FAST, components=5, length=4, layers=(9,)), clip, source)
    assert method.notes() == ["the tower has 6 layers: no prompts at layer 9"]
    pictures = all_tests(source)
    with torch.no_grad():
        torch.testing.assert_close(method.logits(pictures), method.head(pictures.features))

"""DualPrompt, facts read at google-research/l2p, commit dd8836e, and JH-LEE-KR/dualprompt-pytorch, commit 7eb457d.

- Prefix tuning: a prompt has as many vectors for the keys as for the values; they stand before the layer's own.
- Training: the expert of the current task, chosen by a mask; pull = Σ products of its unit key with the unit queries
  / B; cross-entropy with the logits of other tasks at −∞; total = cross-entropy − 1.0 · pull.
- Test: the expert of the key with the largest product.
- General prompt at layers 0 and 1, experts at 2, 3 and 4, lengths 5; a new expert starts from the one before it.

Both codes reshape the chosen experts across the batch without a permute. For a batch of one picture that changes
nothing:
"""

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from clipcil.clip import CLIP
from clipcil.methods.dualprompt import DualPrompt, DualPromptConfig
from support.visual_stream import FAST, Recorder, encode_by_hand, project, stream, tower


def literal(clip: CLIP, method: DualPrompt, pixels: torch.Tensor, expert: int) -> torch.Tensor:
    """Logits (C,) of one picture (C, H, W): prompts as (layers, 2, length, width), [0] for keys, [1] for values."""
    general = torch.stack([torch.stack(layer.chunk(2)) for layer in method.general])
    chosen = torch.stack([torch.stack(layer.chunk(2)) for layer in method.experts[expert]])
    prefixes = {layer: (p[0], p[1]) for layer, p in zip(method.config.general_layers, general, strict=True)}
    for layer, (keys, values) in zip((2, 3, 4), chosen, strict=True):
        before = prefixes.get(layer, (keys[:0], values[:0]))
        prefixes[layer] = (torch.cat([before[0], keys]), torch.cat([before[1], values]))
    tokens = encode_by_hand(clip, pixels, prefixes=prefixes)
    return torch.cat(list(method.head.weights)) @ project(clip, tokens) + torch.cat(list(method.head.biases))


@pytest.mark.parametrize("general", [(0, 1), (1, 2)])  # at layer 2 both kinds meet
@torch.no_grad()
def test_score_and_loss_are_the_reference(general: tuple[int, ...]) -> None:
    clip, session = tower(), Recorder()
    torch.manual_seed(0)
    method = DualPrompt(
        DualPromptConfig(train=FAST, general_layers=general, general_length=2, expert_length=3), clip, session
    )
    tasks = stream(clip).tasks()
    method.learn(next(tasks))
    method.experts[0].normal_()
    task = next(tasks)
    method.learn(task)
    assert torch.equal(method.experts[1], method.experts[0])  # a new expert starts from the one before it
    trained = {id(parameter) for parameter in session.trained}
    assert trained == {id(p) for p in (method.general, method.experts[1], method.keys[1], *method.head.newest())}
    for parameter in method.parameters():
        parameter.normal_()
    rows = torch.tensor([9, 2, 5])
    batch = task.pictures[rows]
    near = normalize(batch.features, dim=1) @ normalize(torch.cat(list(method.keys)), dim=1).T  # (B, tasks)
    for row in range(3):
        expected = literal(clip, method, batch.pixels[row], int(near[row].argmax()))
        torch.testing.assert_close(method.logits(batch[row : row + 1])[0], expected, atol=1e-4, rtol=1e-4)
    logits = torch.stack([literal(clip, method, pixels, 1) for pixels in batch.pixels])
    logits[:, :3] = -torch.inf
    torch.testing.assert_close(session.loss(rows), cross_entropy(logits, batch.labels) - near[:, 1].sum() / 3)

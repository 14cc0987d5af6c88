"""DualPrompt: one general prompt that trains in every task, an expert for each, found by its key at test time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

from clipcil.clip import CLIP
from clipcil.errors import UserError
from clipcil.methods.dualprompt import DualPrompt, DualPromptConfig
from clipcil.training.trainer import Trainer
from support.visual_stream import FAST, Recorder, all_tests, assert_rows_stand_alone, encode_by_hand, learnt, project
from support.visual_stream import stream as make_stream
from support.visual_stream import tower as make_tower

CONFIG = DualPromptConfig(train=FAST, general_length=2, expert_length=3)


@pytest.mark.parametrize("general", [(0, 1), (1, 2)])  # at layer 2 both kinds meet
def test_scores_are_those_of_each_picture_prompted_by_hand(general: tuple[int, ...]) -> None:
    clip = make_tower()
    source = make_stream(clip)
    method = learnt(DualPrompt, replace(CONFIG, general_layers=general), clip, source)
    assert isinstance(method, DualPrompt)
    pictures = all_tests(source)[::5]
    weight, bias = torch.cat(list(method.head.weights)), torch.cat(list(method.head.biases))
    used = set()
    with torch.no_grad():
        scores = method.logits(pictures)
        for row in range(len(pictures)):
            near = [float(cosine_similarity(pictures.features[row], key[0], dim=0)) for key in method.keys]
            task = near.index(max(near))
            used.add(task)
            prefixes = {layer: (p[:2], p[2:]) for layer, p in zip(general, method.general, strict=True)}
            for layer, prompt in zip((2, 3, 4), method.experts[task], strict=True):
                keys, values = prefixes.get(layer, (prompt[:0], prompt[:0]))
                prefixes[layer] = (torch.cat([keys, prompt[:3]]), torch.cat([values, prompt[3:]]))
            feature = project(clip, encode_by_hand(clip, pictures.pixels[row], prefixes=prefixes))
            torch.testing.assert_close(scores[row], weight @ feature + bias, atol=1e-5, rtol=1e-4)
    assert len(used) > 1, "the pictures should not all fall to one expert"


def test_loss_uses_the_expert_of_the_task_and_its_classes_alone() -> None:
    clip = make_tower()
    recorder = Recorder()
    torch.manual_seed(0)
    method = DualPrompt(CONFIG, clip, recorder)
    for task in make_stream(clip).tasks():
        method.learn(task)
        if task.index == 0:
            method.experts[0].add_(1.0)  # so that it is not a copy any more
            continue
        for parameter in [*method.head.parameters(), method.experts[1]]:
            parameter.normal_()
        rows = torch.tensor([3, 0, 7])
        with torch.no_grad():
            features = method.encode(task.pictures[rows].pixels, method.experts[1][:, None])
            own = method.head(features)[:, 3:5].log_softmax(1)
            near = cosine_similarity(task.pictures.features[rows], method.keys[1]).mean()
            expected = -own[torch.arange(3), task.pictures.labels[rows] - 3].mean() - CONFIG.pull * near
            torch.testing.assert_close(recorder.loss(rows), expected)
        assert {id(p) for p in recorder.trained} == {
            id(p) for p in (method.general, method.experts[1], method.keys[1], *method.head.newest())
        }
        return


def test_general_prompt_trains_in_every_task_and_finished_experts_stay() -> None:
    clip = make_tower()
    weights = {key: value.clone() for key, value in clip.state_dict().items()}
    torch.manual_seed(0)
    method = DualPrompt(CONFIG, clip, Trainer())
    for task in make_stream(clip).tasks():
        general = method.general.detach().clone()
        earlier = [p.detach().clone() for p in (*method.experts, *method.keys, *method.head.parameters())]
        kept = [*method.experts, *method.keys, *method.head.parameters()]
        method.learn(task)
        for layer in range(2):
            assert not torch.equal(method.general[layer], general[layer])
        assert all(torch.equal(now, then) for now, then in zip(kept, earlier, strict=True))
        if task.index:
            assert not torch.equal(method.experts[-1], method.experts[-2])
    assert all(torch.equal(value, weights[key]) for key, value in clip.state_dict().items())


def test_a_new_expert_starts_as_the_one_before_and_its_key_afresh() -> None:
    clip = make_tower()
    method = DualPrompt(CONFIG, clip, Trainer())
    method.grow(["a", "b"])
    method.grow(["c"])
    assert torch.equal(method.experts[0], method.experts[1])
    assert method.experts[0] is not method.experts[1]
    assert not torch.equal(method.keys[0], method.keys[1])


def test_a_key_turns_to_the_queries_of_its_task() -> None:
    clip = make_tower()
    source = make_stream(clip)
    tasks = source.tasks()  # held: a stream that is dropped shuts its pictures
    task = next(tasks)
    queries = normalize(task.pictures.features, dim=-1)
    torch.manual_seed(0)
    method = DualPrompt(replace(CONFIG, train=replace(FAST, epochs=8)), clip, Trainer())
    method.learn(task)
    assert cosine_similarity(method.keys[0][0], queries.mean(0), dim=0) > 0.95


def test_a_picture_is_scored_for_itself() -> None:
    clip = make_tower()
    source = make_stream(clip)
    method = learnt(DualPrompt, CONFIG, clip, source)
    pictures = all_tests(source)
    assert isinstance(method, DualPrompt)
    assert len(method.tasks(pictures[:64]).unique()) > 1, "one expert for all would hide a mix-up"
    assert_rows_stand_alone(method, pictures)


def test_layers_the_tower_lacks_are_left_out_and_noted(mini: CLIP) -> None:
    method = DualPrompt(DualPromptConfig(), mini, Trainer())
    method.grow(["a", "b"])
    assert method.experts[0].shape == (1, 10, 384)
    assert method.notes() == ["the tower has 3 layers: no prompts at layer 3, 4"]


def test_a_layer_below_zero_is_refused() -> None:
    with pytest.raises(UserError, match=r"expert_layers.*-1"):
        DualPromptConfig(expert_layers=(-1,))

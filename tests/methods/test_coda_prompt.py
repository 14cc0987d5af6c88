"""CODA-Prompt: weighted components, new ones orthogonal to the old, old ones never moved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cosine_similarity

from clipcil.clip import CLIP
from clipcil.errors import UserError
from clipcil.methods.coda_prompt import CODAPrompt, CODAPromptConfig, penalty, weights
from clipcil.training.trainer import Trainer
from support.visual_stream import FAST, Recorder, all_tests, assert_rows_stand_alone, encode_by_hand, learnt, project
from support.visual_stream import stream as make_stream
from support.visual_stream import tower as make_tower

CONFIG = CODAPromptConfig(train=FAST, components=5, length=4)


def test_weights_are_cosines_of_attended_queries_with_keys() -> None:
    queries, keys, attention = torch.randn(5, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    expected = torch.empty(2, 5, 3)
    for layer in range(2):
        for row in range(5):
            for m in range(3):
                attended = queries[row] * attention[layer, m]
                expected[layer, row, m] = cosine_similarity(attended, keys[layer, m], dim=0)
    torch.testing.assert_close(weights(queries, keys, attention), expected)


def test_scores_are_those_of_each_picture_prompted_by_hand() -> None:
    clip = make_tower()
    source = make_stream(clip)
    method = learnt(CODAPrompt, CONFIG, clip, source)
    assert isinstance(method, CODAPrompt)
    pictures = all_tests(source)[::7]
    weight, bias = torch.cat(list(method.head.weights)), torch.cat(list(method.head.biases))
    with torch.no_grad():
        scores = method.logits(pictures)
        for row in range(len(pictures)):
            prefixes = {}
            for layer in range(5):
                prompt = torch.zeros(4, 32)
                for task in range(3):
                    for m in range(5):
                        attended = pictures.features[row] * method.attention[task][layer, m]
                        alpha = cosine_similarity(attended, method.keys[task][layer, m], dim=0)
                        prompt += alpha * method.prompts[task][layer, m].reshape(4, 32)
                prefixes[layer] = (prompt[:2], prompt[2:])
            feature = project(clip, encode_by_hand(clip, pictures.pixels[row], prefixes=prefixes))
            torch.testing.assert_close(scores[row], weight @ feature + bias, atol=1e-5, rtol=1e-4)


def test_new_components_start_orthogonal_to_trained_ones() -> None:
    clip = make_tower()
    method = learnt(CODAPrompt, CONFIG, clip, make_stream(clip), 2)
    assert isinstance(method, CODAPrompt)
    method.grow(["one more"])
    for rows in (method.prompts, method.keys, method.attention):
        earlier, new = torch.cat(list(rows)[:-1], dim=1), rows[-1]
        assert new.shape[:2] == (5, 5)
        assert (earlier @ new.transpose(1, 2)).abs().max() < 1e-5
        torch.testing.assert_close(new @ new.transpose(1, 2), torch.eye(5).expand(5, 5, 5), atol=1e-5, rtol=0)


def test_components_of_earlier_tasks_stay_and_those_of_the_task_train() -> None:
    clip = make_tower()
    tower = {key: value.clone() for key, value in clip.state_dict().items()}
    torch.manual_seed(0)
    method = CODAPrompt(CONFIG, clip, Trainer())
    for task in make_stream(clip).tasks():
        kept = list(method.parameters())
        earlier = [parameter.detach().clone() for parameter in kept]
        method.learn(task)
        assert all(torch.equal(now, then) for now, then in zip(kept, earlier, strict=True))
        starts = torch.eye(5).expand(5, 5, 5)
        for rows in (method.prompts[-1], method.keys[-1], method.attention[-1]):
            assert not torch.allclose(rows @ rows.transpose(1, 2), starts, atol=1e-4), "they have not moved"
    assert all(torch.equal(value, tower[key]) for key, value in clip.state_dict().items())


def test_any_number_of_components_also_more_than_there_are_dimensions() -> None:
    clip = make_tower()  # keys have 24 dimensions, and three tasks of 11 need 33
    source = make_stream(clip)
    method = learnt(CODAPrompt, replace(CONFIG, components=11), clip, source)
    assert isinstance(method, CODAPrompt)
    assert torch.cat(list(method.keys), dim=1).shape == (5, 33, 24)
    assert torch.isfinite(method.logits(all_tests(source))).all()


def test_loss_is_cross_entropy_over_the_task_plus_the_penalty() -> None:
    clip = make_tower()
    recorder = Recorder()
    torch.manual_seed(0)
    method = CODAPrompt(replace(CONFIG, ortho=0.5), clip, recorder)
    for task in make_stream(clip).tasks():
        method.learn(task)
        for parameter in recorder.trained:  # off their orthogonal start; before the next task sees them
            parameter.normal_(std=0.3)
        if task.index == 0:
            continue
        rows = torch.tensor([2, 9, 4])
        with torch.no_grad():
            own = method.logits(task.pictures[rows])[:, 3:5].log_softmax(1)
            expected = -own[torch.arange(3), task.pictures.labels[rows] - 3].mean()
            for kind in (method.prompts, method.keys, method.attention):
                for layer in range(5):
                    stacked = torch.cat([of_task[layer] for of_task in kind])
                    gram = stacked @ stacked.T
                    expected = expected + 0.5 * (gram - torch.eye(10)).square().mean()
            torch.testing.assert_close(recorder.loss(rows), expected)
        return


def test_penalty_is_zero_for_orthonormal_rows() -> None:
    rows = torch.eye(6)[None, :4]
    assert float(penalty((rows, rows, rows))) == 0
    assert float(penalty((2 * rows, rows, rows))) == pytest.approx(4 * 9 / 16)


def test_a_picture_is_scored_for_itself() -> None:
    clip = make_tower()
    source = make_stream(clip)
    assert_rows_stand_alone(learnt(CODAPrompt, CONFIG, clip, source), all_tests(source))


def test_layers_the_tower_lacks_are_left_out_and_noted(mini: CLIP) -> None:
    method = CODAPrompt(CODAPromptConfig(), mini, Trainer())
    method.grow(["a", "b"])
    assert method.prompts[0].shape == (3, 10, 8 * 384)
    assert method.notes() == ["the tower has 3 layers: no prompts at layer 3, 4"]


def test_a_tower_without_any_of_the_layers_is_read_without_prompts() -> None:
    clip = make_tower()
    source = make_stream(clip)
    method = learnt(CODAPrompt, replace(CONFIG, layers=(9,)), clip, source)
    assert isinstance(method, CODAPrompt)
    pictures = all_tests(source)
    with torch.no_grad():
        torch.testing.assert_close(method.logits(pictures), method.head(pictures.features))


def test_an_odd_length_is_refused() -> None:
    with pytest.raises(UserError, match="'length' is '5'"):
        CODAPromptConfig(length=5)

"""L2P: each picture's nearest prompts, keys drawn to queries, a loss over the task's classes alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cosine_similarity

from clipcil.errors import UserError
from clipcil.methods.l2p import L2P, L2PConfig
from clipcil.prompts.visual import choose, cosine
from clipcil.training.trainer import Trainer
from support.visual_stream import FAST, Recorder, all_tests, assert_rows_stand_alone, encode_by_hand, learnt, project
from support.visual_stream import stream as make_stream
from support.visual_stream import tower as make_tower

CONFIG = L2PConfig(train=FAST, pool=6, length=2, top_k=3, pull=0.1, prompt_range=(-1.0, 1.0), key_range=(-1.0, 1.0))


def nearest_prompts(method: L2P, query: torch.Tensor) -> list[int]:
    near = [float(cosine_similarity(query, key, dim=0)) for key in method.keys]
    return sorted(range(len(near)), key=lambda i: -near[i])[: method.config.top_k]


@pytest.mark.parametrize("head_input", ["class", "prompts"])
def test_scores_are_those_of_each_picture_prompted_by_hand(head_input: str) -> None:
    clip = make_tower()
    source = make_stream(clip)
    method = learnt(L2P, replace(CONFIG, head_input=head_input), clip, source)
    assert isinstance(method, L2P)
    pictures = all_tests(source)[:12]
    weight, bias = torch.cat(list(method.head.weights)), torch.cat(list(method.head.biases))
    with torch.no_grad():
        scores = method.logits(pictures)
        for row in range(len(pictures)):
            chosen = nearest_prompts(method, pictures.features[row])
            tokens = encode_by_hand(clip, pictures.pixels[row], torch.cat([method.prompts[i] for i in chosen]))
            if head_input == "class":
                feature = project(clip, tokens)
            else:
                feature = torch.stack([clip.vision.vision_model.post_layernorm(t) for t in tokens[1:7]]).mean(0)
            torch.testing.assert_close(scores[row], weight @ feature + bias, atol=1e-5, rtol=1e-4)


def test_loss_is_cross_entropy_over_the_task_minus_the_pull() -> None:
    clip = make_tower()
    recorder = Recorder()
    torch.manual_seed(0)
    method = L2P(CONFIG, clip, recorder)
    for task in make_stream(clip).tasks():
        method.learn(task)
        if task.index == 0:
            continue
        for parameter in method.head.parameters():
            parameter.normal_()
        rows = torch.tensor([3, 0, 7, 8])
        expected = 0.0
        for row in rows.tolist():
            picture = task.pictures[row : row + 1]
            chosen = nearest_prompts(method, picture.features[0])
            logits = method.logits(picture)[0]
            own = logits.clone()
            own[:3] = -torch.inf  # the classes of the first task
            near = sum(float(cosine_similarity(picture.features[0], method.keys[i], dim=0)) for i in chosen)
            expected += float(-own.log_softmax(0)[picture.labels[0]]) - CONFIG.pull * near
        assert float(recorder.loss(rows)) == pytest.approx(expected / 4, abs=1e-5)
        return


def test_chosen_keys_are_pulled_to_the_queries_and_the_others_stay() -> None:
    clip = make_tower()
    source = make_stream(clip)
    torch.manual_seed(0)
    method = L2P(replace(CONFIG, key_range=(-0.1, 0.1)), clip, Trainer())
    before = method.keys.detach().clone()
    tasks = source.tasks()  # held: a stream that is dropped shuts its pictures
    task = next(tasks)
    queries = task.pictures.features
    chosen = choose(cosine(queries, before), 3)
    assert len(chosen.unique()) < 6, "the test needs a key that nobody chooses"
    method.learn(task)
    after = choose(cosine(queries, method.keys), 3)
    assert cosine(queries, method.keys).gather(1, after).mean() > cosine(queries, before).gather(1, chosen).mean() + 0.1
    never = [i for i in range(6) if i not in chosen and i not in after]
    assert never
    assert torch.equal(method.keys[never], before[never])


def test_only_chosen_prompts_train() -> None:
    clip = make_tower()
    source = make_stream(clip)
    torch.manual_seed(0)
    method = L2P(CONFIG, clip, Trainer())
    before, keys = method.prompts.detach().clone(), method.keys.detach().clone()
    tasks = source.tasks()  # held: a stream that is dropped shuts its pictures
    task = next(tasks)
    chosen = choose(cosine(task.pictures.features, keys), 3).unique().tolist()
    method.learn(task)
    moved = [i for i in range(6) if not torch.equal(method.prompts[i], before[i])]
    assert set(chosen) <= set(moved)
    assert len(moved) < 6


def test_a_picture_is_scored_for_itself_and_the_tower_stays() -> None:
    clip = make_tower()
    weights = {key: value.clone() for key, value in clip.state_dict().items()}
    source = make_stream(clip)
    method = learnt(L2P, replace(CONFIG, vote_in_training=True), clip, source)
    assert_rows_stand_alone(method, all_tests(source))
    assert all(torch.equal(value, weights[key]) for key, value in clip.state_dict().items())
    assert not any(parameter.requires_grad for parameter in method.parameters())


def test_it_learns() -> None:
    clip = make_tower()
    source = make_stream(clip, (4, 4))
    method = learnt(L2P, replace(CONFIG, train=replace(FAST, epochs=15)), clip, source, 2)
    pictures = all_tests(source)
    with torch.no_grad():
        scores = method.logits(pictures)
    own = torch.where(pictures.labels < 4, scores[:, :4].argmax(1), 4 + scores[:, 4:].argmax(1))
    assert (own == pictures.labels).float().mean() > 0.8  # told the task, chance is 0.25


def test_a_pool_smaller_than_the_choice_is_refused() -> None:
    with pytest.raises(UserError, match="'pool' is 4; it must be at least top_k"):
        L2PConfig(pool=4, top_k=5)

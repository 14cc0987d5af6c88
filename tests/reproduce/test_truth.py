"""The truth in the place of a part of DMC-OT: Gaussians measured again, and a discriminant instead of prompts."""

from dataclasses import replace

import torch
from torch.nn.functional import normalize

from clipcil.data.tasks import TaskStream
from clipcil.methods.dmc import DMCOTConfig
from clipcil.training.trainer import Training
from reproduce.truth import TrueClosed, TrueStatistics
from support.visual_stream import FAST, all_tests, learnt, stream, tower

HOW = DMCOTConfig(stage1=replace(FAST, epochs=2), stage2=Training(epochs=1, lr=2e-3), prompt_length=2)


def taught(kind: type[TrueStatistics]) -> tuple[TrueStatistics, TaskStream]:
    clip = tower()
    plain = stream(clip)
    source = TaskStream(plain.dataset, plain._reader, range(8), plain.sizes, joint=True)
    method = learnt(kind, HOW, clip, source)
    assert isinstance(method, TrueStatistics)
    return method, source


def test_the_gaussians_are_those_of_the_pictures_under_the_last_tower() -> None:
    method, source = taught(TrueStatistics)
    tasks = source.tasks(start=len(source) - 1)  # kept: it closes the pictures when it goes
    last = next(tasks).pictures
    features = normalize(last.features, dim=-1).double()
    means = torch.stack([features[last.labels == label].mean(0) for label in range(8)])
    torch.testing.assert_close(method.memory.means(), means, atol=1e-6, rtol=1e-6)


def test_the_scores_are_log_densities_with_one_covariance() -> None:
    method, source = taught(TrueClosed)
    pictures = all_tests(source)
    with torch.no_grad():
        x = normalize(pictures.features, dim=-1).double()
        scores = method.eval().logits(pictures).double()
    means, covariances = zip(*(method.memory.moments(label) for label in range(8)), strict=True)
    inverse = torch.linalg.inv(torch.stack(covariances).mean(0))
    apart = x[:, None] - torch.stack(means)
    dense = -0.5 * torch.einsum("ncd,de,nce->nc", apart, inverse, apart)
    dense, scores = (each - each.mean(1, keepdim=True) for each in (dense, scores))
    torch.testing.assert_close(scores, dense, atol=1e-3 * float(dense.abs().max()), rtol=0)

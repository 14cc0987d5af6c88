"""Options without changes are the authors' published values; the test file of each method names their code."""

from operator import attrgetter
from typing import Any

import pytest

from clipcil.experiment.spec import RunSpec, method_settings
from clipcil.paper import read_table


def training(*values: Any) -> dict[str, Any]:
    names = ("optimizer", "lr", "momentum", "weight_decay", "batch_size", "epochs", "schedule")
    return dict(zip(names, values, strict=True))


RAPF = {"adapter": {"epochs": 15, "lr": 1e-3, "milestones": (4, 10)}, "margin": 0.1, "replay_epoch": 1900}
RAPF_NAMES = ("replay_classes", "replay_each", "pair_each", "threshold", "fusion", "widen", "adapter.batch_size")
ENGINE = {"adapters": training("sgd", 0.05, 0.9, 0.05, 64, 10, "cosine-epoch"), "text_weight": 2}
ENGINE_NAMES = ("head", "rerank", "image_weight", "replay_noise")
ENGINE_VALUES = {
    "cifar100": (0.8, 0.5, 0.5, 0.25),
    "imagenet-r": (0.8, 0.8, 2, 0.25),
    "cub200": (0.95, 0.8, 2, 0.3),
    "ucf101": (0.85, 0.2, 0, 0),
}
L2P_RATE = 0.03 * 128 / 256  # eight devices with 16 pictures each (README)
DUAL_RATE = pytest.approx(0.03 * 24 / 256, abs=2e-5)  # 24 pictures in the port
PAPER_PROMPT = {"template": "a photo of a {}.", "ensemble": False}

RECIPES: list[tuple[str, str, dict[str, Any]]] = [
    *(("zero-shot", data, PAPER_PROMPT) for data in ("cifar100", "imagenet-r", "ucf101", "cub200", "emoji")),
    ("coop", "cifar100", {"context_length": 16, "context_std": 0.02, "suffix": ".", "train.warmup": 0.1}),
    ("coop", "cifar100", {"train": {"optimizer": "sgd", "lr": 2e-3, "batch_size": 32, "epochs": 10}}),
    ("l2p", "cifar100", {"pool": 10, "length": 10, "top_k": 4, "pull": 1.0, "train.clip_norm": 1}),
    ("l2p", "cifar100", {"train": training("adam", L2P_RATE, 0.9, 0, 128, 5, "constant")}),
    ("dualprompt", "cifar100", {"general_layers": (0, 1), "expert_layers": (2, 3, 4), "train.clip_norm": 1}),
    ("dualprompt", "cifar100", {"general_length": 5, "expert_length": 5, "prompt_range": (-1.0, 1.0), "pull": 1.0}),
    ("dualprompt", "cifar100", {"train": training("adam", DUAL_RATE, 0.9, 0, 24, 5, "constant")}),
    ("coda-prompt", "cifar100", {"layers": (0, 1, 2, 3, 4), "components": 10, "length": 8, "ortho": 0.0}),
    ("coda-prompt", "cifar100", {"train": training("adam", 1e-3, 0.9, 0, 128, 20, "quarter-cosine")}),
    ("proof", "cifar100", {"train": training("sgd", 1e-3, 0.9, 0.05, 64, 5, "cosine-epoch"), "context": 3}),
    ("proof", "cifar100", {"memory": {"pictures": 2000, "per": "dataset"}}),
    ("proof", "imagenet-r", {"train": {"epochs": 10, "batch_size": 48}, "memory.pictures": 4000}),
    ("clap4clip", "cifar100", {"train": {"lr": 1e-3 * 32 / 20, "momentum": 0, "weight_decay": 0, "epochs": 5}}),
    ("clap4clip", "cifar100", {"balance": {"lr": 1.6e-4, "momentum": 0, "epochs": 2, "warmup": 0}, "kl": 1e-3}),
    ("clap4clip", "cifar100", {"train.warmup": 0.3, "samples": 20, "language": 15, "hidden": 2048, "dropout": 0.1}),
    ("rapf", "cifar100", RAPF | dict(zip(RAPF_NAMES, (2, 20, 40, 0.55, 0.6, False, 100), strict=True))),
    ("rapf", "imagenet-r", RAPF | dict(zip(RAPF_NAMES, (5, 10, 20, 0.65, 0.7, True, 64), strict=True))),
    ("rapf", "cub200", RAPF | dict(zip(RAPF_NAMES, (10, 10, 20, 0.65, 0.8, True, 32), strict=True))),
    *(
        (name, data, ENGINE | {"covariance": kind} | dict(zip(ENGINE_NAMES, values, strict=True)))
        for name, kind in (("engine", "averaged"), ("engine-pooled", "pooled"))
        for data, values in ENGINE_VALUES.items()
    ),
]


@pytest.mark.parametrize(("name", "data", "recipe"), RECIPES)
def test_the_options_are_the_authors(name: str, data: str, recipe: dict[str, Any]) -> None:
    config = method_settings(RunSpec(method=name, data=data, backbone="openai/clip-vit-base-patch16"), {})
    for option, value in recipe.items():
        for place, wanted in value.items() if isinstance(value, dict) else [("", value)]:
            path = f"{option}.{place}".rstrip(".")
            assert attrgetter(path)(config) == wanted, path


def test_coda_prompt_has_a_hundred_components_in_twenty_tasks_too() -> None:
    row = next(row for row in read_table("table2").rows if row.method == "coda-prompt")
    assert row.settings == {"components": 100 // 20}

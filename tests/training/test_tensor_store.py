"""What runs share on disk: the same bytes with and without it, for runs that may share, and never for others."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from clipcil import storage
from clipcil.checks import some_classes
from clipcil.clip import CLIP, load_clip
from clipcil.data.reader import Reader
from clipcil.experiment.experiment import Experiment, LoadCache
from clipcil.methods.dmc import DMC
from clipcil.storage import whole_file, write_text
from clipcil.tensor_store import DTYPES, SHARED_BYTES, STAGES_GIB, TensorStore, content_key, pack, read_entry
from clipcil.training.own_random import own_random
from clipcil.training.trainer import Trainer, Training
from support.errors import one_line
from support.short_runs import interrupt
from support.towers import with_other_tokenizer

SAME = ("results.json", "matrix.csv", "predictions.csv", "steps.jsonl")
KEPT = 2 + 7
"""What a run of two tasks leaves in the cache: two towers; their features of the new pictures (task 2: before stage 1
too, for calibration), of the test pictures (task 2: of both tasks), and of old pictures for drift."""
SHORT = {"stage1.epochs": 2, "stage2.epochs": 1, "stage2.steps": 0, "stage1.batch_size": 8}


class Halved(DMC):
    """Somebody's variant of DMC, which scores pictures in another way."""

    name, title, presets = "halved", "Halved", "dmc"

    def encode(self, *given: Any) -> Tensor:
        return super().encode(*given) / 2


class Runner:
    """Runs on four classes in two tasks, with or without a store that they share."""

    def __init__(self, clip: CLIP) -> None:
        self.clip, self.data = clip, some_classes(4)

    def __call__(
        self, folder: Path, kept: TensorStore | None, method: Any = "dmc-ot", **settings: Any
    ) -> dict[str, bytes]:
        shared = LoadCache(backbones={"mini": self.clip}, stages=kept)
        options = {"increment": 2, "seed": 3, "order": "seed:1", "device": "cpu", **SHORT, **settings}
        Experiment(method, data=self.data, cache=shared, **options).run(folder)
        return {name: (folder / name).read_bytes() for name in SAME}


@pytest.fixture(scope="module")
def run() -> Runner:
    return Runner(load_clip("mini"))


def test_runs_share_the_tower_and_end_with_the_same_bytes(tmp_path: Path, run: Runner) -> None:
    kept = TensorStore(tmp_path / "cache")
    plain = run(tmp_path / "plain", None)
    assert run(tmp_path / "cold", kept) == plain and kept.hits == 0
    assert run(tmp_path / "warm", kept) == plain and kept.hits == KEPT
    # Another calibration, other prompts: the same tower after stage 1, and again the bytes of a run without cache.
    other = {"calibration": "none", "task_prompt": False, "prompt_length": 3}
    without = run(tmp_path / "other-plain", None, **other)
    hits = KEPT + KEPT - 1  # features of the new pictures before stage 1 are for calibration alone
    assert run(tmp_path / "other", kept, **other) == without != plain and kept.hits == hits
    settings = {"stage1.lr": 1e-3, "seed": 4, "order": "seed:2", "template": "a {}", "tuned": "norms"}
    for name, value in settings.items():
        run(tmp_path / name, kept, **{name: value})
        assert kept.hits == hits, name  # what stage 1 depends on


def with_fewer_heads(clip: CLIP) -> CLIP:
    """The same weights with half of the attention heads, as another `config.json` could say."""
    vision = replace(clip.config.vision, heads=clip.config.vision.heads // 2)
    other = CLIP(replace(clip.config, vision=vision), clip.tokenizer, clip.preprocess, "mini")
    other.load_state_dict(clip.state_dict())
    other.requires_grad_(False).eval()
    return other


@pytest.mark.parametrize("change", ["shape", "tokenizer", "pillow", "method"])
def test_a_run_takes_nothing_of_another(
    change: str, tmp_path: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another Pillow may decode other pixels, and the key does not contain the code of a user's method."""
    kept, other, method = TensorStore(tmp_path / "cache"), run, Halved if change == "method" else "dmc"
    run(tmp_path / "first", kept, "dmc")
    if change == "shape":
        other = Runner(with_fewer_heads(run.clip))
    if change == "tokenizer":
        other = Runner(with_other_tokenizer(run.clip, tmp_path))
    if change == "pillow":
        monkeypatch.setattr("PIL.__version__", "0.0.1")
    alone = other(tmp_path / "alone", None, method)
    assert other(tmp_path / "second", kept, method) == alone and kept.hits == 0


def test_a_stage_depends_on_the_rate_of_each_group_and_on_the_number_of_rows(tmp_path: Path) -> None:
    kept = TensorStore(tmp_path)

    def trained(rate: float, rows: int = 4) -> list[float]:
        torch.manual_seed(0)
        one, two = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        groups = [{"params": [one], "lr": 0.1}, {"params": [two], "lr": rate}]
        how = Training(epochs=1, batch_size=2)
        loss = lambda rows: (one * two * rows.float()).mean()  # noqa: E731
        Trainer(cache=kept).fit("stage", groups, rows, loss, how, depends_on=["loss"])
        return [float(one), float(two)]

    first = trained(0.1)
    assert trained(0.1) == first and kept.hits == 1
    assert trained(0.2)[1] < first[1] and trained(0.1, rows=8) != first


def test_features_of_a_shared_tower_are_computed_once(tmp_path: Path, run: Runner) -> None:
    """Levels are kept once they were asked for; computed or found, they have the same bits."""
    pictures = run.data.test
    rows, kept = torch.arange(len(pictures)), TensorStore(tmp_path / "cache")

    def reader(scale: float = 1.0) -> Reader:
        clip = run.clip.with_own_vision_tower()
        with torch.no_grad():
            next(clip.vision.parameters()).mul_(scale)
        clip.touch()
        return Reader(clip, tmp_path / "pixels", store=kept)

    first, again, third = reader(), reader(), reader()
    other = reader(scale=1.5)  # the same name, other weights
    for start in range(0, len(rows), 50):
        first.encoded(pictures, rows[start : start + 50])
    expected = first.open(pictures)
    assert first.passed == len(pictures)
    found = again.open(pictures)
    assert torch.equal(found.features, expected.features) and again.passed == 0
    assert torch.equal(found.levels, expected.levels) and again.passed == len(pictures)
    assert torch.equal(third.open(pictures).levels, expected.levels) and third.passed == 0
    assert kept.held_bytes() >= expected.features.nbytes + expected.levels.nbytes
    assert not torch.equal(other.open(pictures).features, expected.features)
    assert other.passed == len(pictures)


def test_features_have_the_same_bits_inside_and_outside_of_mixed_precision(tmp_path: Path, run: Runner) -> None:
    kept, pictures = TensorStore(tmp_path / "cache"), run.data.test

    def features(dtype: torch.dtype | None) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return Reader(run.clip, tmp_path / "pixels", store=kept).open(pictures).features

    expected = features(None)
    assert torch.equal(features(torch.bfloat16), expected) and torch.equal(features(torch.float16), expected)
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    assert torch.equal(features(torch.bfloat16), expected)


def test_a_run_stopped_after_a_cached_stage_resumes_to_the_same_bytes(
    tmp_path: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = TensorStore(tmp_path / "cache")
    plain = run(tmp_path / "cold", kept)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DMC, "train_prompts", interrupt)
        run(tmp_path / "stopped", kept)
    assert kept.hits == 2  # the first tower, and its features of the first task's pictures
    # The first stage comes from its snapshot now, the rest from the cache.
    assert run(tmp_path / "stopped", kept) == plain and kept.hits == 2 + KEPT - 1


def test_the_cache_stays_within_its_bound_and_drops_the_oldest(tmp_path: Path) -> None:
    kept = TensorStore(tmp_path, most_bytes=10_000)
    value = {"a": torch.zeros(900)}  # about 3.7 kB with its header
    keys = [content_key([str(index)]) for index in range(3)]
    kept.save(keys[0], value)
    kept.save(keys[1], value)
    assert kept.load(keys[0]) is not None  # used again: the other one is now the oldest
    kept.save(keys[2], value)
    assert [kept.load(key) is not None for key in keys] == [True, False, True]
    kept.save("large", {"a": torch.zeros(9000)})
    assert kept.load("large") is None


def test_packed_tensors_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = {f"of {dtype}": torch.tensor([[1, 0], [1, 1], [0, 1]]).to(dtype) for dtype in DTYPES}
    tensors |= {"one": torch.tensor(3.0), "none": torch.zeros(0, 4), "turned": torch.arange(6.0).view(2, 3).T}
    facts = {"name": "fünf", "numbers": [1, 2]}
    found, read = read_entry(TensorStore(tmp_path).save("key", tensors, facts))
    assert read == facts and set(found) == set(tensors)
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)
    plain, kept = {name: value.contiguous() for name, value in tensors.items()}, {"facts": json.dumps(facts)}
    assert b"".join(pack(tensors, facts)) == save(plain, kept) and b"".join(pack(tensors)) == save(plain)


def test_the_bound_is_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, size in {"": SHARED_BYTES, "20": 20 * 2**30, "0.5": 2**29}.items():
        monkeypatch.setenv(STAGES_GIB, words)
        assert TensorStore.of_user().most_bytes == size
    for words in ("much", "0", "-1", "nan", "inf"):
        monkeypatch.setenv(STAGES_GIB, words)
        with one_line(STAGES_GIB, f"'{words}'"):
            TensorStore.of_user()


@pytest.mark.parametrize("jump", [-(10**8), 0, 10**8])
def test_what_a_killed_process_left_half_written_is_deleted_and_what_is_being_written_is_not(
    jump: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock says, which may have jumped in between."""
    left, later = tmp_path / ".tmp" / ("ab" * 8), time.time() + jump
    with whole_file(tmp_path / "x") as part:
        part.write_bytes(b"half")
        left.write_bytes(b"half")
        monkeypatch.setattr(time, "time", lambda: later)
        TensorStore(tmp_path).save("key", {"a": torch.zeros(1)})
        assert part.exists() and not left.exists()
    assert (tmp_path / "x").read_bytes() == b"half" and not (tmp_path / ".tmp").exists()


def test_a_new_file_that_is_deleted_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(handle: int, how: int) -> None:
        monkeypatch.undo()
        write_text(tmp_path / "y", "")

    monkeypatch.setattr(storage, "flock", lock)
    with whole_file(tmp_path / "x") as part:
        write_text(tmp_path / "y", "")
        assert part.exists()


def test_the_key_sees_every_bit_every_boundary_and_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.tensor([1.0, 2.0])
    other = [one.view(2, 1), one.double(), torch.nextafter(one, one + 1)]
    given = [["ab", "c"], ["a", "bc"], [one], [one, ""], *([each] for each in other)]
    keys = {content_key(each) for each in given}
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER")
    assert len(keys | {content_key(["ab", "c"])}) == len(given) + 1


def test_own_random_neither_takes_nor_leaves_a_trace() -> None:
    torch.manual_seed(7)
    torch.randn(5)
    with own_random("stage", 1):
        first = torch.randn(3)
    after = torch.randn(3)
    torch.manual_seed(7)
    with own_random("stage", 1):
        again = torch.randn(3)
    with own_random("stage", 2):
        assert not torch.equal(torch.randn(3), first)
    torch.randn(5)
    assert torch.equal(first, again) and torch.equal(torch.randn(3), after)

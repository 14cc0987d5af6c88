"""Methods and datasets in files that the user names: run, benched, swept and continued; never executed otherwise."""

import pickle
import sys
from pathlib import Path

import pytest

import clipcil
from clipcil import plugins
from clipcil.cli import main
from clipcil.data import dataset
from clipcil.data.dataset import named_dataset
from clipcil.experiment.bench import attempt
from clipcil.experiment.grid import PlannedRun, plan
from clipcil.experiment.spec import Grid
from clipcil.methods import registry
from clipcil.methods.registry import named_method
from support.errors import one_line
from support.lessons import refused, week

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_method.py"
MEANS = '''
import clipcil
from clipcil.settings import options
from torch.nn.functional import normalize

@options
class Config:
    factor: float = 1.0
    """A factor of the scores, which changes no answer."""

class Means(clipcil.Method):
    name, title, scores, Config = "own-means", "Own means", "cosine", Config
    def build(self):
        self.growing_buffer("means", self.dim)
    def learn_task(self, task):
        for label in self.new_labels:
            self.means[label] = task.pictures.features[task.pictures.labels == label].mean(0)
    def logits(self, batch):
        return self.config.factor * normalize(batch.features, dim=-1) @ normalize(self.means, dim=-1).T
'''
SHAPES = """
from PIL import Image
from clipcil.data.dataset import Dataset, register

@register("hues", "plain colours", "nothing")
def open_hues(root, options):
    def pictures(size):
        return {name: [Image.new("RGB", (size, size), name)] * 2 for name in ("red", "green", "blue", "black")}
    return Dataset.from_pictures("hues", pictures(40), pictures(50))
"""


def as_in_a_new_process(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(registry, "REGISTRY", {name: kind for name, kind in clipcil.methods().items() if "own" not in name})
    patch.setattr(dataset, "REGISTRY", {name: each for name, each in clipcil.datasets().items() if name != "hues"})
    for name in list(plugins.LOADED):
        patch.delitem(plugins.LOADED, name)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a method and a dataset; what is registered is forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    as_in_a_new_process(monkeypatch)
    (tmp_path / "mine.py").write_text(MEANS)
    (tmp_path / "hues.py").write_text(SHAPES)
    return tmp_path


def test_the_example_learns(own: Path) -> None:
    main(["run", str(EXAMPLE), "--data", "hues.py", "--tasks", "2", "--out", "run", "--quiet"])
    [row] = clipcil.read_runs("run")
    assert row["method"] == "whitened" and row["last"] > 60
    assert row["code"][0].startswith("my_method_") and str(EXAMPLE.parent) not in str(row)


@pytest.mark.parametrize("word", ["mine.py", "mine.py:Means", "mine:Means"])
def test_a_file_is_a_method_in_three_ways(own: Path, word: str) -> None:
    assert named_method(word).name == "own-means"
    assert clipcil.Experiment(word, data="hues.py", tasks=2, factor=2).config.factor == 2


def test_bench_and_sweep_take_files(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", "hues.py", "--tasks", "2", "--out", "out", "--quiet"]
    main(["bench", "--methods", "mine.py", "simplecil", "--set", "factor=3", *words])
    printed = capsys.readouterr().out
    assert "Own means" in printed and "SimpleCIL" in printed
    main(["sweep", "mine.py", "factor", "3", "4", *words])
    assert len(list((own / "out").glob("hues-own-means-*"))) == 2, "the run with factor=3 is done only once"
    (own / "mine.py").write_text(MEANS.replace("self.config.factor *", "-"))
    main(["bench", "--methods", "mine.py", *words])
    assert {row["last"] for row in clipcil.read_runs("out") if row["method"] == "own-means"} == {100.0, 0.0}


def test_another_process_executes_the_files_of_a_run_before_it_reads_its_settings(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [planned] = plan(Grid(methods=("mine.py",), data=("hues.py",), set=("factor=3",), run={"tasks": 2}))
    sent = pickle.dumps(planned)
    as_in_a_new_process(monkeypatch)
    for name in planned.spec.code or ():
        monkeypatch.delitem(sys.modules, name)
    there: PlannedRun = pickle.loads(sent)
    assert there.table == planned.table and there.config.factor == 3
    assert attempt(there) == "" and clipcil.read_runs(planned.folder)[0]["last"] == 100


def test_a_table_of_the_paper_takes_a_method_of_a_file_as_one_more_row(own: Path) -> None:
    planned = plan(Grid(table="table1", methods=("simplecil", "mine.py"), data=("emoji",), run={"backbone": "mini"}))
    assert [(each.label, each.spec.method) for each in planned] == [
        ("SimpleCIL", "simplecil"),
        ("Own means", "own-means"),
    ]


def test_a_run_is_continued_only_where_its_files_are_named_and_are_the_same(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["run", "mine.py", "--data", "hues.py", "--tasks", "2", "--out", "run", "--quiet"])
    whole = (own / "run" / "results.json").read_bytes()
    (own / "run" / "results.json").unlink()
    as_in_a_new_process(monkeypatch)
    line = refused(capsys, "run", "--resume", "run")
    assert "'hues'" in line and "clipcil run --data FILE.py --resume run" in line
    line = refused(capsys, "run", "--data", "hues.py", "--resume", "run")
    assert "'own-means'" in line and "clipcil run FILE.py --resume run" in line
    words = ["run", "mine.py", "--data", "hues.py", "--resume", "run", "--quiet"]
    main(words)
    assert (own / "run" / "results.json").read_bytes() == whole
    (own / "mine.py").write_text(f"{MEANS}\n# edited")
    assert "run.code" in refused(capsys, *words)


def test_a_stopped_run_says_how_to_continue_with_its_files(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: object, folder: Path, **_: object) -> None:
        (folder / "config.toml").parent.mkdir()
        (folder / "config.toml").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(clipcil.Experiment, "run", stop)
    with pytest.raises(SystemExit) as stopped:
        main(["run", "mine:Means", "--data", "hues.py", "--out", "my run", "--log", "csv"])
    assert stopped.value.code == 130
    assert "clipcil run mine:Means --data hues.py --resume 'my run' --log csv\n" in capsys.readouterr().err


def test_nothing_that_a_folder_names_is_executed(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "evil.py").write_text("raise SystemExit('executed')")
    (own / "config.toml").write_text("[run]\nmethod = 'evil.py'\n[method]\n")
    assert "executed" not in (line := refused(capsys, "run", "--resume", str(own))) and "'evil.py'" in line
    main(["learn", "model", str(week(own / "week")), "--method", "simplecil", "--quiet"])
    model = own / "model" / "model.toml"
    model.write_text(model.read_text().replace('"simplecil"', '"evil.py"'))
    assert "no method 'evil.py'" in refused(capsys, "predict", "model", "week/green")


@pytest.mark.parametrize(
    ("code", "word", "named"),
    [
        ("x = 1\n", "bad.py", ["bad.py", "no method"]),
        ("x = 1\n", "bad.py:Means", ["bad.py", "no method"]),
        ("\nx = = 1\n", "bad.py", ["bad.py, line 2", "SyntaxError"]),
        ("import clipcil\n\nimport nothing_like_it\n", "bad", ["bad.py, line 3", "nothing_like_it"]),
        (MEANS.replace("own-means", "simplecil"), "bad.py", ["two methods", "'simplecil'", "bad.py"]),
        (MEANS.replace("title", "label"), "bad.py", ["'title'"]),
        (f"{MEANS}\nclass Others(Means):\n    name = 'others'\n", "bad.py", ["bad.py:Means, bad.py:Others"]),
        (MEANS, "bad.py:Meens", ["'Meens'", "'Means'"]),
        (None, "bad.py", ["bad.py", "missing"]),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(own: Path, code: str | None, word: str, named: list[str]) -> None:
    if code is not None:
        (own / "bad.py").write_text(code)
    with one_line(*named):
        named_method(word if ":" in word or word.endswith(".py") else f"{word}:Means")
    with one_line("mine.py", "no dataset"):
        named_dataset("mine.py")

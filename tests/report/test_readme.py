"""Every number of the README's tables, and the page of claims, come from `results/`."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from clipcil.errors import UserError
from clipcil.paper import Claim
from clipcil.report.claims import Judged, Part, Verdict
from clipcil.report.runs import find_runs

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
MARKED = ("README.md", "docs/beyond.md", "docs/baselines.md", "docs/speed.md")
OTHER = ROOT / "benchmarks/results/grocery-store"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_readme", ROOT / "tools" / "update_readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_and_the_claims_are_what_results_says(tool: ModuleType) -> None:
    for path, text in tool.pages(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale; run python tools/update_readme.py"
    marked = "".join((ROOT / name).read_text(encoding="utf-8") for name in MARKED)
    of_folders = {"choice", *tool.HELD_OUT, *tool.SPEED}
    assert sorted(re.findall(r"<!-- results:(\w+) -->", marked)) == sorted({*tool.TABLES} - of_folders)
    assert set(re.findall(r"<!-- results:(\w+) [\w/-]+ -->", marked)) == {"beyond", *of_folders}
    assert marked.count("<!-- results:") == marked.count("<!-- /results -->")


def test_a_changed_result_changes_the_table(tool: ModuleType) -> None:
    runs = find_runs([RESULTS])
    before = tool.methods_table(runs)
    assert tool.updated("a\n<!-- results:methods -->\nold\n<!-- /results -->\nb", ROOT) == (
        f"a\n<!-- results:methods -->\n\n{before}\n\n<!-- /results -->\nb"
    )
    runs[0].values["last"] += 30
    assert tool.methods_table(runs) != before


def test_a_table_can_be_that_of_a_folder(tool: ModuleType) -> None:
    marker = f"<!-- results:beyond {OTHER.relative_to(ROOT)} -->"
    text = tool.updated(f"{marker}\n<!-- /results -->", ROOT)
    assert text.startswith(f"{marker}\n\n|")
    assert tool.beyond_table(find_runs([OTHER])) in text and "cifar100" not in text


def test_a_table_of_speed_can_be_made_of_what_was_measured(tool: ModuleType, tmp_path: Path) -> None:
    machine = {"cores": 2, "threads": 2, "torch": "2.9", "instructions": "AVX2", "load before": 0.1, "quick": False}
    row = {"name": "P1", "step": "prompts", "theirs": "9 s", "ours": "1 s", "result": "9.0×"}
    (tmp_path / "speed").mkdir()
    (tmp_path / "speed" / "here.json").write_text(json.dumps({"machine": machine, "rows": [row]}))
    text = tool.updated("<!-- results:speed speed -->\n<!-- /results -->", tmp_path)
    assert "| P1 | prompts | 9 s | 1 s | 9.0× |  |" in text
    (tmp_path / "speed" / "there.json").write_text(json.dumps({"machine": machine, "rows": [row | {"goal": "≥5×"}]}))
    text = tool.updated("<!-- results:ratios speed -->\n<!-- /results -->", tmp_path)
    assert text.count("| P1 |") == 1 and "| 9.0× | ≥5× |" in text


def test_an_unknown_table_is_named(tool: ModuleType) -> None:
    with pytest.raises(UserError, match="no table 'nothing'"):
        tool.updated("<!-- results:nothing -->\n<!-- /results -->", ROOT)


def test_the_evidence_has_no_weights_and_names_no_folder_of_a_machine() -> None:
    files = []
    for folder in (RESULTS, OTHER.parent):
        found = [path for path in folder.rglob("*") if path.is_file()]
        assert found and all(path.stat().st_size < 60_000 for path in found), folder.name  # weights are far larger
        files += found
    kinds = {path.name for path in files if path.parent.name != "speed" or path.suffix != ".json"}
    held_out = {"cifar100.json", "cub200.json", "emoji.json"}
    assert kinds <= {"config.toml", "results.json", "timing.json", "predictions.csv.gz", "NOTES.md", *held_out}
    assert not [path for path in files if path.suffix in (".json", ".toml") and "data_root" in path.read_text()]


def test_a_cell_of_the_claims_names_the_tasks_where_verdicts_differ_or_one_is_missing(tool: ModuleType) -> None:
    both = Claim("A beats B", "A", ("B",), tasks=(10, 20))

    def judged(tasks: int, verdict: Verdict) -> Judged:
        return Judged(both, ("emoji", tasks, "mini", ""), (Part("B", None, None, (), None, False, verdict),))

    ten, twenty = judged(10, "holds"), judged(20, "holds")
    assert tool._verdict(both, [ten, twenty]) == "holds"
    assert tool._verdict(both, [ten]) == "holds (10 tasks)"
    other = judged(20, "cannot be told")
    assert tool._verdict(both, [ten, other]) == "holds (10 tasks); cannot be told (20 tasks)"
    assert tool._verdict(both, []) == "–"


@pytest.mark.parametrize("word", ["--chek", "--help", "docs/claims.md"])
def test_a_word_that_is_not_known_writes_nothing(
    tool: ModuleType, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "pages", lambda _: pytest.fail("the pages were made"))
    assert tool.main([word]) == 2 and f"'{word}' is not known" in capsys.readouterr().out

"""Every number of the README's tables, and the page of claims, come from the evidence."""

import re
from pathlib import Path

from clipcil.report.runs import find_runs
from reproduce import tables
from reproduce.judge import Claim, ClaimResult, Part, Verdict

ROOT = Path(__file__).resolve().parents[2]
MARKED = ("README.md", "docs/results.md", "docs/beyond.md", "docs/baselines.md", "docs/speed.md")


def test_the_readme_and_the_claims_are_what_results_says() -> None:
    for path, text in tables.pages(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale; run python -m reproduce tables"
    marked = "".join((ROOT / name).read_text(encoding="utf-8") for name in MARKED)
    of_folders = {"choice", "heads", "novelty", "speed", "ratios"}
    assert sorted(re.findall(r"<!-- results:(\w+) -->", marked)) == sorted({*tables.TABLES} - of_folders)
    assert set(re.findall(r"<!-- results:(\w+) [\w/-]+ -->", marked)) == {"beyond", *of_folders}
    assert marked.count("<!-- results:") == marked.count("<!-- /results -->")


def test_a_changed_result_changes_the_table() -> None:
    runs = tables.runs_in(ROOT / tables.CLAIMS)
    before = tables.methods_table(runs)
    assert tables.updated("a\n<!-- results:methods -->\nold\n<!-- /results -->\nb", ROOT) == (
        f"a\n<!-- results:methods -->\n\n{before}\n\n<!-- /results -->\nb"
    )
    changed = [run.model_copy(update={"last": run.last / 2}) for run in runs]
    assert tables.methods_table(changed) != before


def test_the_evidence_names_no_folder_of_a_machine() -> None:
    runs = find_runs([ROOT / tables.EVIDENCE])
    assert len(runs) > 900 and not [run.folder for run in runs if "data_root" in run.run]


def test_a_cell_of_the_claims_names_the_tasks_where_verdicts_differ_or_one_is_missing() -> None:
    both = Claim("A beats B", "A", ("B",), tasks=(10, 20))

    def judged(tasks: int, verdict: Verdict) -> ClaimResult:
        return ClaimResult(both, ("emoji", tasks, "mini", ""), (Part("B", None, None, (), None, False, verdict),))

    ten, twenty = judged(10, "holds"), judged(20, "holds")
    assert tables._verdict(both, [ten, twenty]) == "holds"
    assert tables._verdict(both, [ten]) == "holds (10 tasks)"
    other = judged(20, "cannot be told")
    assert tables._verdict(both, [ten, other]) == "holds (10 tasks); cannot be told (20 tasks)"
    assert tables._verdict(both, []) == "–"

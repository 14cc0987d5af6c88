"""The paper's claims: complete, judged by the right runs, and with verdicts that follow from the intervals."""

import json
import shutil
from pathlib import Path

import pytest

from clipcil.cli import main
from clipcil.errors import UserError
from clipcil.experiment.bench import FinishedRuns, run_grid
from clipcil.experiment.grid import plan
from clipcil.experiment.spec import Grid
from clipcil.intervals import Interval
from clipcil.paper import read_table
from clipcil.report.answers import read_predictions
from clipcil.report.runs import find_runs
from reproduce.__main__ import main as reproduce
from reproduce.claims import markdown, markdown_table
from reproduce.judge import ClaimResult, decide, judge_claims, outdated, paper_difference, read_claims
from reproduce.keep import keep
from support.finished_runs import write_run

ORDERS = ("seed:1993", "seed:1", "seed:2")
TABLE = read_table("claims")
ROWS = {row.label: row for row in TABLE.rows}


def write_claim_runs(folder: Path, shares: dict[str, float], orders: tuple[str, ...] = ORDERS, **more: object) -> Path:
    """Runs of these rows of the table, as `clipcil bench claims` plans them, with made-up answers."""
    for planned in plan(Grid("claims", data=("emoji",), orders=orders, out=folder)):
        if planned.label not in shares:
            continue
        row = ROWS[planned.label]
        choices = {"order": planned.spec.order, "tasks": planned.spec.tasks, **more}
        settings = row.settings_with(planned.spec.tasks)
        words = [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in settings.items()]
        write_run(planned.folder, row.method, 0, shares[planned.label], *words, preset=True, **choices)
    return folder


def change(folder: Path, part: str, **values: object) -> None:
    found = json.loads((folder / "results.json").read_text())
    found["config"][part] |= values
    (folder / "results.json").write_text(json.dumps(found))


def of(judged: list[ClaimResult], says: str) -> ClaimResult:
    return next(each for each in judged if each.claim.says.startswith(says))


def test_fourteen_claims_about_rows_that_are_there() -> None:
    assert len(read_claims()) == 14
    for claim in read_claims():
        for label in (claim.better, *claim.worse):
            assert {*claim.tasks} <= {*(ROWS[label].tasks or (TABLE.tasks,))}, (claim.says, label)


def test_the_grid_has_every_row_in_every_order_and_number_of_tasks() -> None:
    planned = plan(Grid("claims", data=("emoji",)))
    counts = {(each.label, each.spec.tasks) for each in planned}
    assert len(planned) == 3 * len(counts) == 3 * sum(len(row.tasks) or 1 for row in TABLE.rows)
    assert {each.spec.order for each in planned} == set(ORDERS)
    assert len({each.folder for each in planned}) == len(planned)
    one = plan(Grid("claims", data=("emoji",), run={"order": "natural", "tasks": 5}))
    assert {(each.spec.order, each.spec.tasks) for each in one} == {("natural", 5)}


@pytest.mark.parametrize(
    ("interval", "margin", "verdict"),
    [
        ((1.0, 0.1, 2.0), None, "holds"),
        ((1.0, -0.1, 2.0), None, "cannot be told"),
        ((-1.0, -2.0, -0.1), None, "does not hold"),
        ((0.5, -1.0, 2.9), 3.0, "holds"),
        ((0.5, -1.0, 3.1), 3.0, "cannot be told"),
        ((-9.0, -12.0, -3.1), 3.0, "does not hold"),
    ],
)
def test_verdicts(interval: tuple[float, float, float], margin: float | None, verdict: str) -> None:
    assert decide(Interval(*interval), margin) == verdict


def test_no_claim_rests_on_held_out_training_pictures_or_on_fewer_than_three_orders(tmp_path: Path) -> None:
    shares = {"DMC": 0.3, "DMC-OT": 0.6}
    for orders, verdict in ((ORDERS, "holds"), (ORDERS[:2], "cannot be told")):
        folder = write_claim_runs(tmp_path / verdict, shares, orders)
        assert of(judge_claims(find_runs([folder])), "DMC-OT beats DMC at 10 tasks").verdict == verdict
    runs = find_runs([write_claim_runs(tmp_path / "held out", shares, hold_out=1)])
    assert len(runs) == 12 and all(run.run["hold_out"] == 1 for run in runs)
    assert not judge_claims(runs) and not outdated(runs)


def test_the_paper_s_numbers_stand_beside_ours() -> None:
    better = ROWS["DMC-OT"]
    assert paper_difference(better, ROWS["DMC-OT without OT"], "cub200", 10)[0] == pytest.approx(78.11 - 77.95)
    assert paper_difference(better, ROWS["RAPF"], "cifar100", 20)[0] == pytest.approx(81.00 - 78.73)
    two = paper_difference(ROWS["DMC"], ROWS["DMC simultaneous"], "emoji", 10)
    assert two[1] and two[0] == pytest.approx(2.91, abs=0.01)  # the mean of its four datasets, as its text says
    assert paper_difference(better, ROWS["β = 0.5"], "cifar100", 10) == (None, False)
    told = next(claim for claim in read_claims() if claim.says.startswith("DMC alone beats RAPF"))
    found = [paper_difference(ROWS["DMC"], ROWS[each], "emoji", 10, told.paper_datasets) for each in told.worse]
    assert found == [(pytest.approx(0.77), True), (pytest.approx(2.565), True)]  # its text has 2.61 for the second


def test_a_row_that_is_the_same_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    """On CUB-200 the preset has β = 1.5 and λ = 0.5."""
    write_claim_runs(tmp_path, {"DMC-OT": 0.6}, data="cub200")
    told = {each.claim.says: each for each in judge_claims(find_runs([tmp_path])) if each.stream[1] == 10}
    for what, others in (("weight β", ["β = 0.01", "β = 0.5"]), ("weight λ", ["λ = 0.01", "λ = 2"])):
        (judged,) = (each for says, each in told.items() if what in says)
        assert [part.worse for part in judged.parts] == others and judged.verdict == "not measured"
    assert len(next(each for says, each in told.items() if "length M" in says).parts) == 3


def test_a_row_may_have_other_settings_with_other_numbers_of_tasks(tmp_path: Path) -> None:
    """CODA-Prompt's authors have 100 components in all: 10 for each of ten tasks, 5 for each of twenty."""
    planned = plan(Grid("claims", data=("emoji",), only=("coda-prompt",)))
    assert {(each.spec.tasks, each.config.components) for each in planned} == {(10, 10), (20, 5)}
    asked = plan(Grid("claims", data=("emoji",), only=("coda-prompt",), run={"tasks": "20"}))
    assert {each.config.components for each in asked} == {5}
    with pytest.raises(UserError, match="decide 'components' themselves"):
        plan(Grid("claims", data=("emoji",), only=("coda-prompt",), set=("components=3",)))
    assert paper_difference(ROWS["DMC-OT"], ROWS["CODA-Prompt"], "cifar100", 20)[0] == pytest.approx(81.00 - 67.61)

    def parts() -> dict[int, str]:
        judged = judge_claims(find_runs([tmp_path]))
        both = [each for each in judged if each.claim.says.startswith("DMC-OT beats each of the ten")]
        return {each.stream[1]: next(p.verdict for p in each.parts if p.worse == "CODA-Prompt") for each in both}

    write_claim_runs(tmp_path, {"DMC-OT": 0.9, "CODA-Prompt": 0.5})
    assert parts() == {10: "holds", 20: "holds"}
    for path in tmp_path.glob("*coda-prompt*/"):
        change(path, "method", components=10)
    assert parts() == {10: "holds", 20: "not measured"}


def test_kept_runs_are_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_claim_runs(tmp_path / "runs", {"DMC-OT": 0.9, "ZS-CLIP": 0.3}, device="cpu")
    assert keep([folder], "claims", tmp_path / "kept") == 12
    words = ["bench", "claims", "--data", "emoji", "--only", "zero-shot", "simplecil", "--out", str(tmp_path / "new")]
    words += ["--kept", str(tmp_path / "kept"), "--dry-run"]
    main(words)
    assert "6 of 12 runs are finished in" in capsys.readouterr().out and not (tmp_path / "new").exists()
    with monkeypatch.context() as gpu:  # as on a machine with a GPU, where the kept runs are those of a CPU
        gpu.setattr("torch.cuda.is_available", lambda: True)
        main(words)
        printed = capsys.readouterr().out
        assert "0 of 12 runs are finished" in printed and "note: 6 of the runs" in printed and "--device cpu" in printed
    grid = Grid("claims", data=("emoji",), only=("zero-shot",), out=tmp_path / "new", kept=(tmp_path / "kept",))
    ended = run_grid(plan(grid), grid)
    expected = {(run.order, run.tasks): run.last for run in find_runs([folder]) if run.method == "zero-shot"}
    assert {(each.result.order, each.result.tasks): each.result.last for each in ended if each.result} == expected
    assert [path.name for path in grid.out.iterdir()] == ["results.jsonl"]  # nothing was run
    other = Grid("claims", data=("emoji",), only=("zero-shot",), run={"shots": 2}, kept=grid.kept)
    assert not any(map(FinishedRuns(other.kept).find, plan(other)))
    with pytest.raises(UserError, match="not a folder"):
        FinishedRuns([tmp_path / "none"])


def test_runs_are_judged(tmp_path: Path) -> None:
    shares = {"DMC": 0.5, "ZS-CLIP": 0.3}
    shares |= dict.fromkeys(("DMC simultaneous", "DMC-OT", "DMC-OT without OT", "M = 2"), 0.9)
    runs = find_runs([write_claim_runs(tmp_path, shares)])
    judged = judge_claims(runs)
    for says, verdict in (
        ("DMC-OT beats DMC at 10", "holds"),
        ("DMC-OT beats DMC at 20", "holds"),
        ("Two stages", "does not hold"),
        ("Calibration by", "cannot be told"),
        ("DMC-OT beats each of the ten", "cannot be told"),  # nine are not measured
        ("A task prompt", "not measured"),
    ):
        assert of(judged, says).verdict == verdict, says
    assert of(judged, "Results are stable in the prompt length").parts[0].verdict == "holds"
    assert not [each for each in judged if each.claim.datasets == ("cub200",)]
    page = markdown(runs, judged)
    assert page.count("\n## ") == 14 and "Not measured." in page  # no claim is dropped
    assert "| 5. DMC-OT beats DMC at 10 tasks | holds |" in page and "+2.90 (mean)" in page


def test_a_run_with_other_settings_is_no_row_of_the_claims(tmp_path: Path) -> None:
    shares = {"DMC": 0.5, "DMC-OT": 0.9}
    folder = write_claim_runs(tmp_path, shares)
    for pattern, verdict in (("*dmc-ot*/", "not measured"), ("*dmc-seed*/", "holds")):  # one of the two, then both
        for path in folder.glob(pattern):
            stage1 = json.loads((path / "results.json").read_text())["config"]["method"]["stage1"]
            change(path, "method", stage1={**stage1, "lr": 0.5})
        assert of(judge_claims(find_runs([folder])), "DMC-OT beats DMC at 10").verdict == verdict
    wanted = "DMC-OT on emoji, 10 tasks, ran with stage1.lr 0.5 (today "
    assert any(line.startswith(wanted) for line in outdated(find_runs([folder])))
    for path in folder.glob("*dmc-ot*/"):
        change(path, "method", beta=0.7)
    assert of(judge_claims(find_runs([folder])), "DMC-OT beats DMC at 10").verdict == "not measured"


def test_several_seeds_of_an_order_are_one_order_to_student_s_t(tmp_path: Path) -> None:
    folder = write_claim_runs(tmp_path / "one", {"DMC": 0.5, "DMC-OT": 0.9})
    for number, path in enumerate(sorted(folder.glob("*/results.json"))):
        values = json.loads(path.read_text())
        path.write_text(json.dumps({**values, "last": values["last"] + number}))
    for path in folder.iterdir():
        copy = tmp_path / "two" / path.name
        shutil.copytree(path, copy)
        change(copy, "run", seed=1)
    one, two = (
        of(judge_claims(find_runs(places)), "DMC-OT beats DMC at 10").parts[0]
        for places in ([folder], [folder, tmp_path / "two"])
    )
    assert len(one.by_order) == 3 and len(two.by_order) == 6
    assert one.over_orders is not None and two.over_orders is not None
    assert two.over_orders == pytest.approx(one.over_orders) and one.over_orders.low < one.over_orders.high
    assert two.difference == pytest.approx(one.difference)


def test_rows_are_compared_on_the_device_and_in_the_precision_that_most_of_them_have(tmp_path: Path) -> None:
    """More runs of one row in another precision do not tear it from the rows that it is compared with."""
    shares = {"DMC": 0.5, "DMC simultaneous": 0.3, "DMC-OT": 0.9}
    write_claim_runs(tmp_path / "a", shares, device="cuda")
    more = {"device": "cuda", "precision": "bf16-mixed"}
    write_claim_runs(tmp_path / "b", {"DMC-OT": 0.1}, (*ORDERS, "seed:3"), **more)
    assert of(judge_claims(find_runs([tmp_path])), "DMC-OT beats DMC at 10").verdict == "holds"


def test_a_name_is_text_in_the_terminal_and_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_claim_runs(tmp_path, {"DMC": 0.5, "DMC-OT": 0.9})
    for path in folder.iterdir():
        change(path, "run", data="\x1b[2J<img src=x>", backbone="mini\n\n# Proven <script>")
    assert reproduce(["claims", str(folder)]) == 0
    printed, runs = capsys.readouterr().out, find_runs([folder])
    assert "\x1b" not in printed and "\\x1b[2J" in printed
    page = markdown(runs, judge_claims(runs))
    assert "<img" not in page and "<script" not in page and "\n# Proven" not in page
    assert markdown_table(["a|b", "c\nd"], [["1", "2"]]).splitlines()[0] == "| a\\|b | c d |"


def test_evidence_says_the_same_as_the_run_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_claim_runs(tmp_path / "runs", {"DMC": 0.5, "DMC-OT": 0.9})
    words = ["keep", str(folder), "--part", "claims", "--evidence", str(tmp_path / "kept")]
    assert reproduce(words) == 0 and "12 runs added" in capsys.readouterr().out
    first = {path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()}
    assert sorted(first) == ["predictions.parquet", "runs.parquet"]
    kept, runs = find_runs([tmp_path / "kept" / "claims"]), find_runs([folder])
    assert [each.parts for each in judge_claims(kept)] == [each.parts for each in judge_claims(runs)]
    for one, other in zip(kept, runs, strict=True):
        assert one.folder.name == other.folder.name and one.timing == other.timing
        assert {**one.values, "config": None} == {**other.values, "config": None} and "data_root" not in one.run
        answers = [each._replace(probability=None) for each in read_predictions(other.folder)]
        assert read_predictions(one.folder) == sorted(answers, key=lambda each: (each.task, each.true, each.row))
    assert reproduce(words) == 0  # the same runs again change nothing
    assert {path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()} == first
    with pytest.raises(UserError, match="no finished run"):
        find_runs([tmp_path / "kept" / "other"])


def test_keeping_does_not_replace_another_run(tmp_path: Path) -> None:
    for kind in ("bird", "tree"):
        names = [f"{kind} {index}" for index in range(6)]
        write_run(tmp_path / kind / "run", data="folder", data_root=tmp_path / kind, names=names)
    keep([tmp_path / "bird"], "own", tmp_path / "kept")
    before = (tmp_path / "kept" / "runs.parquet").read_bytes()
    with pytest.raises(UserError, match="own/run"):
        keep([tmp_path / "tree"], "own", tmp_path / "kept")
    assert (tmp_path / "kept" / "runs.parquet").read_bytes() == before
    assert keep([tmp_path / "tree"], "trees", tmp_path / "kept") == 1 and len(find_runs([tmp_path / "kept"])) == 2


def test_a_run_without_predictions_can_be_kept(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "predictions.csv").unlink()
    change(folder, "method", strange=[None, {"deep": None, "x": 1}])
    assert keep([folder], "own", tmp_path / "kept") == 1
    (run,) = find_runs([tmp_path / "kept"])
    assert run.settings["strange"] == [None, {"deep": None, "x": 1}]
    with pytest.raises(UserError, match="no predictions"):
        read_predictions(run.folder)

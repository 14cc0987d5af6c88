"""`clipcil doctor`: one line each, and exit code 1 if something does not work."""

from pathlib import Path

import pytest
import torch

from clipcil.cli import main
from clipcil.tensor_store import STAGES_GIB, TensorStore


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPCIL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "rows").write_bytes(b"0" * 3_000_000)
    monkeypatch.setenv(STAGES_GIB, "1")
    TensorStore.of_user().save("features", {"features": torch.zeros(500_000)})
    installed = ["av>=13; extra == 'video'", 'nothing-like-it; extra == "wandb"', "torch>=2"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: installed)
    main(["doctor"])
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert len(lines) == 8 and all(name.startswith("ok ") for name in lines)
    assert lines["ok      cache"] == f"{tmp_path / 'cache'}, 5 MB; 2 of at most 1074 MB are features and stages"
    assert lines["ok      extras"] == "video; not installed: wandb"
    (tmp_path / "file").touch()
    monkeypatch.setenv("CLIPCIL_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("clipcil.classifier.classifier.Classifier.score", lambda self, source: 0.5)
    with pytest.raises(SystemExit) as stop:
        main(["doctor"])
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert stop.value.code == 1 and len(failed) == 2 and str(tmp_path / "file") in failed[0] and "50%" in failed[1]

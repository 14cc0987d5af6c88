import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import clipcil
from clipcil.checks import some_classes
from clipcil.clip import CLIP
from support.lessons import plain
from support.short_runs import Killed, Runner, stop_after

# A test must not fail because the machine is busy.
settings.register_profile("calm", deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
settings.load_profile("calm")


@pytest.fixture(scope="session")
def runner(mini: CLIP) -> Runner:
    return Runner(mini, some_classes(6))


@pytest.fixture(scope="session", autouse=True)
def picture_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Preprocessed pictures are shared only by the tests of this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPCIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(scope="session")
def whole(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three tasks that was never stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    runner.run("rapf", out)
    return out


@pytest.fixture(scope="session")
def cut_short(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, killed when two tasks and the stage of the third were kept."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 5)
        runner.run("rapf", out)
    return out


@pytest.fixture
def stopped(cut_short: Path, tmp_path: Path) -> Path:
    """A copy of the run that was killed."""
    return Path(shutil.copytree(cut_short, tmp_path / "stopped"))


@pytest.fixture(scope="session")
def made() -> clipcil.Classifier:
    model = clipcil.Classifier("simplecil")
    model.learn({"red": plain("red", "darkred"), "blue": plain("blue", "navy")})
    return model


@pytest.fixture
def saved(made: clipcil.Classifier, tmp_path: Path) -> Path:
    made.save(tmp_path / "m")
    return tmp_path / "m"

"""Models on the Hugging Face hub: one commit holds a model, its weights and its card; what `undo` needs stays here."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from clipcil.classifier import folder as models
from clipcil.classifier.state import WEIGHTS, Facts
from clipcil.errors import UserError, first_line


def push(folder: Path, repository: str, public: bool = False) -> str:
    """Upload a model to `owner/name`, which is created where it does not exist; returns the address of the commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    weights, api = models.load_model(folder).facts.weights, HfApi()  # a damaged model is refused
    with _errors_of_the_hub(repository):
        api.create_repo(repository, private=not public, exist_ok=True)
        old = [name for name in api.list_repo_files(repository) if WEIGHTS.fullmatch(name) and name != weights]
        new = [CommitOperationAdd(name, str(folder / name)) for name in (models.MODEL, models.CARD, weights)]
        operations = [*new, *map(CommitOperationDelete, old)]
        return str(api.create_commit(repository, operations, commit_message="A model of clipcil").commit_url)


def pull(repository: str, folder: Path) -> Facts:
    """Download the model `owner/name[@revision]` into a folder that is new, empty or holds a model."""
    from huggingface_hub import HfApi

    models.refuse_other_folders(folder)
    name, _, revision = repository.partition("@")
    with TemporaryDirectory() as place, _errors_of_the_hub(repository, place):
        options: dict[str, Any] = {"revision": revision or None, "local_dir": place}
        HfApi().hf_hub_download(name, models.MODEL, **options)
        HfApi().hf_hub_download(name, models.read_model(Path(place)).weights, **options)
        state = models.load_model(Path(place))
    with models.hold_model(folder):
        return models.write_model(folder, state, keep_previous=True)


@contextmanager
def _errors_of_the_hub(repository: str, place: str = "") -> Iterator[None]:
    try:
        yield
    except Exception as error:  # gated, misspelt, no token, no network: the library has a class for each
        told = str(error) if isinstance(error, UserError) else first_line(error)
        reason = told.removesuffix(f"; {models.RESTORE_ADVICE}").replace(f"{place}/", "")
        raise UserError(f"'{repository}' on the hub: {reason}") from error

"""`hub`: a dataset of the Hugging Face hub, through its parquet files; no code of the dataset is run."""

from __future__ import annotations

from pathlib import Path

from clipcil.data.dataset import Dataset, register
from clipcil.data.datasets.parquet import TEST, TRAIN, ParquetOptions, from_files
from clipcil.data.sources import list_files
from clipcil.errors import UserError, first_line
from clipcil.network import downloads_allowed
from clipcil.settings import options

CONVERTED = "refs/convert/parquet"
"""The branch where the hub keeps the parquet form of datasets that come in another one."""


@options
class HubOptions(ParquetOptions):
    repo: str = ""
    """The dataset, owner/name."""
    config: str = ""
    """The configuration (subset), for a dataset that has several."""
    revision: str | None = None
    """Branch, tag or commit; None: main, then the hub's own conversion to parquet."""


@register("hub", "any image dataset of the Hugging Face hub", "the data option repo=owner/name", HubOptions)
def open_hub(root: Path | None, options: HubOptions) -> Dataset:
    """`root`, where given, is the folder the files are kept in (else the hub's own cache)."""
    if options.repo.count("/") != 1 or not all(options.repo.split("/")):
        raise UserError(f"dataset hub: the data option repo is '{options.repo}'; write repo=owner/name")
    for revision in [options.revision] if options.revision else [None, CONVERTED]:
        folder = _download(options.repo, revision, root)
        places = {path: path.relative_to(folder).parts for path in list_files(folder, (".parquet",))}
        files = [path for path, parts in places.items() if not options.config or options.config in parts]
        if files:
            # Configurations are top folders with the same parts; reading two as one would count pictures twice.
            tops = {places[path][0] for path in files if len(places[path]) > 1}
            configs = sorted(top for top in tops if top.lower() not in (*TRAIN, *TEST, "data"))
            if not options.config and len(configs) > 1:
                raise UserError(
                    f"hub dataset '{options.repo}' has configurations {', '.join(configs)}; choose one with config=NAME"
                )
            return from_files(options.repo, folder, files, options)
    wanted = f" of configuration '{options.config}'" if options.config else ""
    raise UserError(f"hub dataset '{options.repo}' has no parquet files{wanted}; download it and use --data folder")


def _download(repo: str, revision: str | None, root: Path | None) -> Path:
    """The folder of its parquet files. Offline mode (HF_HUB_OFFLINE=1) answers from the library's cache alone."""
    from huggingface_hub import snapshot_download

    local = not downloads_allowed()
    try:
        found = snapshot_download(
            repo,
            repo_type="dataset",
            revision=revision,
            allow_patterns=["*.parquet"],
            local_dir=root,
            local_files_only=local,
        )
    except Exception as error:  # gated, misspelt, offline: the library has a class for each
        what = f"cannot get dataset '{repo}' from the hub ({first_line(error)})"
        if local:
            what = f"dataset '{repo}' is not on this machine, and none is downloaded because a folder names it"
        advice = "allow it with --allow-download" if local else "download its files by hand and use --data parquet"
        raise UserError(f"{what}; {advice}") from error
    return Path(found)

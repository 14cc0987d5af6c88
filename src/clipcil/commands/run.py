"""`clipcil run`: one method on one dataset."""

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from clipcil.commands.types import Download, File, Flag, Folder, Words, takes
from clipcil.errors import UserError, quoted
from clipcil.network import allow_downloads
from clipcil.plugins import names_file

Logs = Annotated[tuple[Literal["csv", "tensorboard", "wandb"], ...], Parameter(metavar="NAME", show_default=False)]


@takes("RunSpec", without=("code",))
def run(
    method: str | None = None,
    /,
    *,
    set: Words = (),
    preset: bool = True,
    out: Folder = None,
    resume: Folder = None,
    config: File = None,
    log: Logs = (),
    quiet: Flag = False,
    allow_download: Download = False,
    **options: Any,
) -> None:
    """Learn a dataset task by task with one method, and evaluate after each task.

    Without arguments it runs DMC-OT on the embedded pictures with the embedded backbone, in a minute or two.

    For example:
      clipcil run simplecil --data emoji
      clipcil run dmc-ot --set stage1.lr=1e-5 beta=0.5
      clipcil run dmc-ot --data cifar100 --data-root DIR --backbone openai/clip-vit-base-patch16
      clipcil run mine.py --tasks 5
      clipcil run --config runs/2026-01-31-dmc-ot-emoji/config.toml --seed 1 --log tensorboard
      clipcil run --resume runs/2026-01-31-dmc-ot-emoji

    Args:
        method: The method: a name (`clipcil methods` lists them), or a file with a method of your own, such as mine.py
            or mine.py:CLASS. Default: dmc-ot.
        set: Settings of the method; `clipcil methods METHOD` lists them.
        preset: Start from the preset (published values) for this method and dataset.
        out: Folder for the results; must be new. Default: a dated folder under runs/.
        resume: Continue the stopped run in this folder with its own options; --data-root says where its data is now.
        config: TOML file with options in [run] and settings of the method in [method], such as the config.toml of a
            run; options given in words take precedence.
        log: Also write live logs into the folder: csv (log.csv), tensorboard or wandb, which are extras.
        quiet: Print only the closing lines.
    """
    from clipcil.commands import text
    from clipcil.distributed import from_first, rank
    from clipcil.experiment.experiment import Experiment
    from clipcil.experiment.folder import finished_run, fresh_folder
    from clipcil.experiment.loggers import open_loggers
    from clipcil.experiment.monitor import open_display
    from clipcil.experiment.spec import over, read_tables
    from clipcil.settings import merge, parse_words
    from clipcil.training.cpu import prepare_process

    prepare_process()
    if resume is not None and (out is not None or config is not None):
        raise UserError("give --resume to continue a run, or --out and --config for a new one, not both")
    chosen = options | ({"method": method} if method is not None else {})
    if "data_options" in chosen:
        chosen["data_options"] = parse_words(chosen["data_options"])
    kept = {"run": {}, "method": {}} if config is None else read_tables(config)
    chosen = {**over(kept["run"], chosen), "settings": merge(kept["method"], parse_words(set))}
    callbacks = open_loggers(log)
    if resume is not None:
        experiment, folder = Experiment.resume(resume, chosen), resume
        if (done := finished_run(folder, experiment.spec, experiment.config)) is not None:
            text.say(f"{folder} is complete; nothing is left to do")
            text.results(done.values, folder)
            return
    else:
        experiment = Experiment(**chosen, preset=preset)
        experiment.launch()
        folder = from_first(out or fresh_folder(f"{experiment.spec.method}-{experiment.spec.data}"))
    try:
        with allow_downloads(allow_download):
            results = experiment.run(
                folder, display=open_display(quiet), resume=resume is not None, callbacks=callbacks
            )
    except KeyboardInterrupt as stop:
        if not (folder / "config.toml").is_file():
            raise KeyboardInterrupt("stopped before anything was learnt") from stop
        words = [method] if method and names_file(method) else []
        words += ["--data", options["data"]] if names_file(options.get("data", "")) else []
        words = [*words, "--resume", str(folder), *(["--log", *log] if log else [])]
        raise KeyboardInterrupt(f"stopped; continue with: clipcil run {' '.join(map(quoted, words))}") from stop
    if rank() == 0:
        text.results(results.as_dict(), folder)

"""The run: lock the folder, resume from its last checkpoint, learn and evaluate every task, write the results."""

import time
from contextlib import nullcontext
from pathlib import Path

from clipcil.distributed import barrier, from_first, name_lost_processes, rank
from clipcil.errors import UserError
from clipcil.experiment.experiment import Experiment
from clipcil.experiment.folder import open_run, restore
from clipcil.experiment.monitor import Display, default_display
from clipcil.experiment.results import Results


def run(experiment: Experiment, folder: Path, display: Display | None = None, resume: bool = True) -> Results:
    """Learn and evaluate every task, writing results and checkpoints to `folder`.

    Killed or interrupted at any moment, the same call continues from the last finished stage or task and ends with the
    same results. Where several processes work on the run, the first one alone reads and writes the folder.

    Args:
        experiment: The experiment; it must not have begun outside a run folder.
        folder: Where the run is kept; no other process may be writing to it.
        display: Shows the progress. Default: a bar in a notebook, nothing elsewhere.
        resume: Whether a run in `folder` may be continued; otherwise it is refused.

    Raises:
        UserError: The folder holds something else, or training diverged.
    """
    if experiment.loaded and not experiment.mark:
        raise UserError("this experiment has begun outside a run folder; make a new Experiment for run()")
    experiment.launch()
    leads = rank() == 0
    display = (display or default_display()) if leads else Display()
    opened = open_run(folder, experiment.table, display, resume) if leads else nullcontext()
    with opened as place, name_lost_processes(folder):
        experiment.reset(display, (place.log,) if place else (), place.stages if place else None)
        checkpoint, experiment.mark = from_first((place.begin(experiment), experiment.mark) if place else (None, ""))
        if checkpoint is not None:
            restore(experiment, *checkpoint)
            display.tell(f"going on after task {len(experiment.records)} of {len(experiment)}")
        display.start(repr(experiment), len(experiment))
        try:
            for task in experiment:
                started = time.perf_counter()
                experiment.learn(task)
                results = experiment.evaluate()
                if place:
                    place.save(experiment)
                display.row(results, time.perf_counter() - started)
            if place:
                place.finish(experiment)
            barrier()
        finally:
            display.stop()
        return experiment.results

"""The run: lock the folder, resume from its last checkpoint, learn and evaluate every task, write the results."""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

from clipcil.distributed import barrier, from_first, name_lost_processes, rank
from clipcil.errors import UserError
from clipcil.experiment.experiment import Experiment
from clipcil.experiment.folder import open_run, restore
from clipcil.experiment.monitor import Display, Step, default_display
from clipcil.experiment.results import Results
from clipcil.training.trainer import Callback


def run(
    experiment: Experiment,
    folder: Path,
    display: Display | None = None,
    resume: bool = True,
    callbacks: Sequence[Callback] = (),
) -> Results:
    """Learn and evaluate every task, writing results and checkpoints to `folder`.

    Killed or interrupted at any moment, the same call continues from the last finished stage or task and ends with the
    same results. Where several processes work on the run, the first one alone reads and writes the folder.

    Args:
        experiment: The experiment; it must not have begun outside a run folder.
        folder: Where the run is kept; no other process may be writing to it.
        display: Shows the progress. Default: a bar in a notebook, nothing elsewhere.
        resume: Whether a run in `folder` may be continued; otherwise it is refused.
        callbacks: Receivers of progress, such as a log; the first process alone calls them.

    Raises:
        UserError: The folder holds something else, or training diverged.
    """
    if experiment.loaded and not experiment.mark:
        raise UserError("this experiment has begun outside a run folder; make a new Experiment for run()")
    experiment.launch()
    leads = rank() == 0
    display = (display or default_display()) if leads else Display()
    watchers = [display, *(callbacks if leads else ())]
    opened = open_run(folder, experiment.table, display, resume) if leads else nullcontext()
    with opened as place, name_lost_processes(folder):
        experiment.reset(display, (place.log, *callbacks) if place else (), place.stages if place else None)
        checkpoint, experiment.mark = from_first((place.begin(experiment), experiment.mark) if place else (None, ""))
        if checkpoint is not None:
            restore(experiment, *checkpoint)
            display.tell(f"continuing after task {len(experiment.records)} of {len(experiment)}")
        with ExitStack() as ending:
            for each in watchers:
                each.begin_run(experiment, folder)
                ending.callback(each.end_run)
            if place:
                _tell_again(experiment, place.log.read() if callbacks else [], callbacks)
            for task in experiment:
                experiment.learn(task)
                results = experiment.evaluate()
                if place:
                    place.save(experiment)
                for each in watchers:
                    each.end_task(results)
            if place:
                place.finish(experiment)
            barrier()
        return experiment.results


def _tell_again(experiment: Experiment, steps: Sequence[Step], callbacks: Sequence[Callback]) -> None:
    """Tell callbacks the steps and tasks before a run was continued, so that what they keep is complete."""
    for task in range(len(experiment.records)):
        for each in callbacks:
            for step in (step for step in steps if step.task == task):
                each.step(step.stage, step.epoch, step.step, torch.tensor(step.loss), step.rate)
            each.end_task(experiment.results_after(task + 1))

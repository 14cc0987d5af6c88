"""`clipcil run`: one method on one dataset."""

from __future__ import annotations

from typing import Annotated

import tyro

from clipcil.commands.types import Folder, Name, Number, Words


def run(
    method: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[METHOD]")] = "dmc-ot",
    data: Name = "emoji",
    data_root: Folder = None,
    data_set: Words = (),
    tasks: Number = None,
    increment: Number = None,
    base: Number = None,
    order: Name = "seed:1993",
    backbone: Name = "mini",
    seed: int = 0,
    shots: Number = None,
    set: Words = (),
    preset: bool = True,
    skip_broken: bool = False,
    device: Name = "cpu",
    precision: Name = "32-true",
    out: Folder = None,
    resume: Folder = None,
    quiet: bool = False,
) -> None:
    """Learn a dataset task by task with one method, and measure after each task.

    Without any argument: DMC-OT on the embedded pictures with the embedded backbone, in a minute or two.
    Examples: clipcil run simplecil --data emoji; clipcil run dmc-ot --data cifar100 --data-root DIR --tasks 10
    --backbone openai/clip-vit-base-patch16; clipcil run dmc-ot --set stage1.lr=1e-5 beta=0.1; clipcil run --resume
    runs/2026-01-31-dmc-ot-emoji.

    Args:
        method: Which method; `clipcil methods` lists them.
        data: Which dataset; `clipcil datasets` lists them.
        data_root: Folder that holds the dataset.
        data_set: Options of the dataset, such as split=random; `clipcil datasets NAME` lists them.
        tasks: Number of tasks. Default: 10.
        increment: Classes per task, instead of a number of tasks.
        base: Classes in the first task, where it is larger than the rest.
        order: Class order: natural, seed:N, icarl, or a file. seed:1993 is the order most of the field uses.
        backbone: mini (embedded), a Hugging Face id or folder, or a file of OpenAI's or open_clip's.
        seed: Seed of everything random.
        shots: At most this many training pictures per class.
        set: Settings of the method; `clipcil methods METHOD` lists them.
        preset: Start from the values kept for this method and dataset.
        skip_broken: Leave out pictures that cannot be decoded, and list them, instead of stopping.
        device: cpu, cuda, mps or auto.
        precision: 32-true, bf16-mixed or 16-mixed.
        out: Folder for the results; made anew. Default: a dated folder under runs/.
        resume: Folder of a run that was stopped; goes on with the settings kept there.
        quiet: Print the closing lines only.
    """
    from clipcil.experiment.display import open_display
    from clipcil.experiment.launch import launch, resume_run

    given = {
        "method": method, "data": data, "data_root": data_root, "data_options": data_set, "tasks": tasks,
        "increment": increment, "base": base, "order": order, "backbone": backbone, "seed": seed, "shots": shots,
        "skip_broken": skip_broken, "device": device, "precision": precision,
    }  # fmt: skip
    display = open_display(quiet)
    if resume is not None:
        resume_run(resume, given, set, display)
    else:
        launch(given, set, preset, out, display)

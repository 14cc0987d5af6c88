"""`clipcil methods` and `clipcil datasets`: what there is."""

from __future__ import annotations

from typing import Annotated

import tyro


def methods(
    method: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[METHOD]", help_behavior_hint="")] = "",
    data: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = "",
) -> None:
    """List the methods, or the settings of one with their values and reasons.

    Examples: clipcil methods; clipcil methods dmc-ot; clipcil methods rapf --data cub200.

    Args:
        method: Show the settings of this method.
        data: Show the values of the preset for this dataset.
    """
    from clipcil.experiment.catalogue import print_methods, print_settings

    if not method:
        print_methods()
    else:
        print_settings(method, data)


def datasets(
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[DATASET]", help_behavior_hint="")] = "",
) -> None:
    """List the datasets and what each needs to be there, or the options of one.

    Examples: clipcil datasets; clipcil datasets cub200.

    Args:
        data: Show the options of this dataset, for --data-set key=value.
    """
    from clipcil.experiment.catalogue import print_data_options, print_datasets

    if data:
        print_data_options(data)
    else:
        print_datasets()

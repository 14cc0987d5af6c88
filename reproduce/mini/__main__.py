"""Make the embedded backbone again, one command per step; README.md in this folder says what each needs.

python -m reproduce.mini sources WORK
python -m reproduce.mini cache WORK PICTURES [--part 0 --parts 2]
python -m reproduce.mini texts WORK PICTURES
python -m reproduce.mini text WORK
python -m reproduce.mini vision WORK PICTURES
python -m reproduce.mini export WORK
python -m reproduce.mini card WORK --cifar100 FOLDER --cub200 FOLDER [--before FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from clipcil.errors import UserError
from reproduce.mini import steps

torch.set_num_threads(1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reproduce.mini", description="Make the embedded backbone.")
    parser.add_argument("step", choices=list(steps.STEPS))
    parser.add_argument("work", type=Path, help="folder for everything the recipe makes")
    parser.add_argument("pictures", type=Path, nargs="?", help="folder of the four sets of pictures")
    parser.add_argument("--part", type=int, default=0, help="which share of the cache this process makes")
    parser.add_argument("--parts", type=int, default=1, help="how many processes share the cache")
    parser.add_argument("--steps", type=int, help="train for fewer or more steps than the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cifar100", type=Path, help="folder of CIFAR-100, to measure")
    parser.add_argument("--cub200", type=Path, help="folder of CUB-200-2011, to measure")
    parser.add_argument("--before", type=Path, help="an older backbone to measure beside")
    try:
        steps.STEPS[(given := parser.parse_args(arguments)).step](given)
    except UserError as error:
        print(f"mini: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How kinds of arguments are shown in help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

Name = Annotated[str, tyro.conf.arg(metavar="NAME")]
Number = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
Words = Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE…", help_behavior_hint="")]

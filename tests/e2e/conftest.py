"""Browser tests share the made-up runs of the report's tests, and the servers and pictures of those of `serve`."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("report", "serve", "classifier"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / folder))

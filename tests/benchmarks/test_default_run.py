"""P6 times what the program really calls: a renamed function would stop it or leave a clock at zero."""

from __future__ import annotations

from benchmarks import p6_default_run


def test_every_part_of_the_default_run_is_timed() -> None:
    towers, _ = p6_default_run.run(quick=True)
    inside = towers.details["inside"]
    assert set(inside) == {"trunk", "vision tower", "text tower", "backward of the towers"}
    assert min(inside.values()) > 0
    assert sum(inside.values()) < towers.details["total"]

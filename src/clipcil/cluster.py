"""Ray, for grids of runs and for predicting many pictures. It is an extra and is imported only when asked for."""

from typing import Any

from clipcil.errors import UserError, first_line
from clipcil.plugins import need_extra


def need_ray() -> Any:
    """The module `ray`; a missing one is a `UserError` that says how to install it."""
    return need_extra("ray")


def connect(address: str | None = None, **local: Any) -> Any:
    """Connect to the Ray cluster at `address` (or `auto`), unless this process is connected; returns the module `ray`.

    Without an address, Ray is started here with the options `local` of `ray.init`, and ends with the process.
    """
    ray = need_ray()
    if not ray.is_initialized():
        started: dict[str, Any] = {"address": "local", "include_dashboard": False, **local}
        try:
            ray.init(log_to_driver=False, logging_level="ERROR", **({"address": address} if address else started))
        except Exception as error:  # a node that takes too long to start raises `Exception` itself
            what = f"there is no Ray cluster at '{address}'" if address else "Ray could not be started on this machine"
            raise UserError(f"{what}: {first_line(error)}") from error
    return ray

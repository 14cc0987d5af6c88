"""Ray, for grids of runs and for predicting many pictures. It is an extra and is imported only when asked for."""

from __future__ import annotations

from typing import Any

from clipcil.errors import UserError, first_line


def need_ray() -> Any:
    """The module `ray`.

    Raises:
        UserError: It is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise UserError("this needs Ray; install it with: pip install 'clipcil[ray]'") from error
    return ray


def connect(address: str | None = None, **local: Any) -> Any:
    """Connect to a Ray cluster, unless this process is connected already.

    Args:
        address: Address of the cluster, or `auto`. Without one a Ray is started here and ends with the process.
        local: Options of `ray.init` for the Ray that is started here, such as num_cpus.

    Returns:
        The module `ray`.

    Raises:
        UserError: Ray is not installed or cannot be started, or there is no cluster at the address.
    """
    ray = need_ray()
    if not ray.is_initialized():
        try:
            options: dict[str, Any] = (
                {"address": address} if address else {"address": "local", "include_dashboard": False, **local}
            )
            ray.init(log_to_driver=False, logging_level="ERROR", **options)
        except Exception as error:  # a node that takes too long to start raises `Exception` itself
            what = f"there is no Ray cluster at '{address}'" if address else "Ray could not be started on this machine"
            raise UserError(f"{what}: {first_line(error)}") from error
    return ray

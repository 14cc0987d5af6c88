"""What a run is: every choice, resolved, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from clipcil.data.dataset import full_options
from clipcil.errors import UserError
from clipcil.methods.registry import find_method
from clipcil.settings import merge, override, read_toml, to_dict, within


@dataclass(frozen=True)
class RunSpec:
    """The choices outside the method. With the method's own settings, they decide the result."""

    method: str = "dmc-ot"
    data: str = "emoji"
    data_root: Path | None = None
    data_options: dict[str, Any] = field(default_factory=dict)
    """What is chosen about the dataset: its split, its columns; see the dataset's options."""
    skip_broken: bool = False
    """Go on without pictures that cannot be decoded, and list them, instead of stopping at the first."""
    tasks: int | None = None
    increment: int | None = None
    base: int | None = None
    order: str = "seed:1993"
    backbone: str = "mini"
    seed: int = 0
    shots: int | None = None
    """Training pictures per class at the most; None: all."""
    device: str = "cpu"
    precision: str = "32-true"

    def __post_init__(self) -> None:
        within("seed", self.seed, 0, 2**63 - 1)
        if self.shots is not None:
            within("shots", self.shots, 1)


def read_preset(data: str, method: str, backbone: str) -> dict[str, Any]:
    """The settings kept for this method on this dataset, and for this backbone where the preset names it."""
    found: dict[str, Any] = {}
    name = find_method(method).presets or method
    for folder in ("any", data):
        file = resources.files("clipcil") / "presets" / folder / f"{name}.toml"
        if file.is_file():
            with resources.as_file(file) as path:
                values = read_toml(path)
            special = values.pop("backbone", {})
            found = merge(found, values, special.get(backbone, {}))
    return found


def method_settings(spec: RunSpec, given: Mapping[str, Any], preset: bool = True) -> Any:
    """The method's config: its defaults, then the preset, then what was given."""
    kind = find_method(spec.method)
    config = kind.Config()
    if preset:
        try:
            config = override(config, read_preset(spec.data, spec.method, spec.backbone))
        except UserError as error:
            raise UserError(f"preset {spec.data}/{spec.method}: {error}") from error
    return override(config, given)


def as_table(spec: RunSpec, config: Any) -> dict[str, Any]:
    """Both together, as `config.toml` holds them."""
    spec = replace(spec, data_options=full_options(spec.data, spec.data_options))
    return {"run": to_dict(spec), "method": to_dict(config)}
